"""robust-srun: takes srun's place in an sbatch script."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from robust_slurm.command_line import version
from robust_slurm.command_line.parser import version_text
from robust_slurm.command_line.run import show
from robust_slurm.config import Config, ConfigError, flags, help_text, load
from robust_slurm.slurm import Slurm
from robust_slurm.state_dir.ledger import StateDirError, prepare
from srun_wrapper.code.deployment import Deployment
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.start import start_with_code
from srun_wrapper.command import handover, output_rules
from srun_wrapper.command.batch_script import (
    NO_KILL_LINE,
    batch_script,
    has_no_kill,
    script_words,
)
from srun_wrapper.command.containers import in_image
from srun_wrapper.command.in_force import checkpoint_env, in_force, observing
from srun_wrapper.command.input_rules import StdinFeed, feed
from srun_wrapper.command.kinds import BCAST, accepted, warning
from srun_wrapper.command.layout import StepPlan, allocation, plan_step
from srun_wrapper.command.numbered_files import as_paths, task_count
from srun_wrapper.command.srun_options import SrunCommand, UsageError, split
from srun_wrapper.command.step_request import StepRequest, effective
from srun_wrapper.command.steps import Launch, step_name
from srun_wrapper.decide.exclusions import reports
from srun_wrapper.decide.explain import explain
from srun_wrapper.job import topology
from srun_wrapper.job.reporting import job_log
from srun_wrapper.job.reporting.report import flush, say
from srun_wrapper.protocol.task_options import OutputPlan, TaskOptions
from srun_wrapper.requeue.resubmit import SCRIPT_WORDS, SIZE
from srun_wrapper.signatures.catalogue import Catalogue, CatalogueError
from srun_wrapper.signatures.catalogue import load as load_signatures
from srun_wrapper.supervisor.app import Supervisor
from srun_wrapper.supervisor.step import again
from srun_wrapper.supervisor.step.attempts import Attempts
from srun_wrapper.supervisor.step.remaining import corrected, fit, remaining_allocation
from srun_wrapper.supervisor.step.signals import FORWARDED, TERMINATING

BAD_INPUT = 2
SLURM_VERSION = 3.0  # s for srun --version, which looks for slurm.conf for a minute
OUTPUT_VARIABLES = {
    "label": ("SLURM_LABELIO",),
    "output": ("SRUN_OUTPUT", "SLURM_STDOUTMODE"),
    "error": ("SRUN_ERROR", "SLURM_STDERRMODE"),
}


def main() -> NoReturn:
    again.note(os.environ)
    started = dict(os.environ)
    try:
        code = run(sys.argv[1:], os.environ)
    except (UsageError, ConfigError) as err:
        say(f"error: {err}")
        code = BAD_INPUT
    if missing := job_log.end():
        say(missing)
    flush()
    if code == again.AGAIN:
        again.begin(sys.argv[1:], started)
    if sys.stdout is not None:  # closed by whoever started us
        sys.stdout.flush()
    sys.exit(code)


def open_to_owner() -> None:
    """Keep a umask from closing our files, and the ranks', to their own user. srun passes it on."""
    umask = os.umask(0o077)
    os.umask(umask & 0o077)
    if umask & 0o700:
        say(
            f"warning: umask {umask:04o} denies you the files that you create, so robust-srun and "
            f"the ranks run with umask {umask & 0o077:04o}; correct the umask in the job script"
        )


def run(argv: list[str], started: Mapping[str, str]) -> int:
    """Run with our environment, ``started``; returns the exit code. UsageError, ConfigError."""
    by = handover.handed(started)
    env: Mapping[str, str] = handover.own_environment(started)
    if by is not None and "PATH" in env:
        os.environ["PATH"] = env["PATH"]  # Slurm's commands are beside the user's srun
    try:
        command = split(argv, flags())
    except UsageError as error:
        handover.back(by, error, argv, started, say)
    if by is not None:
        command.robust.setdefault("robust-mode", by.mode)
    elif command.get("help") or command.get("usage"):
        return show("robust-srun", help_text())
    elif command.get("version"):
        return show("robust-srun", f"robust-srun {version()} ({slurm_version(env)})")
    if "robust-help" in command.robust:
        return show("robust-srun", help_text())
    if "robust-version" in command.robust:
        return show("robust-srun", version_text("robust-srun"))
    if "robust-explain" in command.robust:
        rules = explain(in_force(load(command.robust, env, warn=warning_line)))
        return show("robust-srun", "\n".join(rules))
    if shutil.which("srun") is None:
        raise UsageError("srun is not on PATH: Slurm's commands must be installed on this host")
    if command.informational:
        handover.to_srun(argv, started)
    given = load(command.robust, env, warn=warning_line)
    config = in_force(given, command if by is None else None)  # the plugin's is srun's own
    if config.mode == "off":
        handover.to_srun([*command.argv(), *command.command], started)
    check_regex(config)
    observed = given if config.mode == "observe" else None
    catalogue = signatures(config)
    topology.check(config.mesh, config.place_alpha)
    try:
        nodes, request = allocation(env), effective(command, env)
        if by is not None:
            why = handover.why_plain(command, request, env, config.spares)
            if why is not None:
                raise UsageError(why)
        command = accepted(command, request, config, env)
        plan = plan_step(request, nodes, config.spares, env.get("SLURM_TASKS_PER_NODE"))
    except UsageError as error:
        handover.back(by, error, argv, started, say)
    if BCAST in env:
        warning_line(f"{BCAST} is ignored: the program is started from where it is")
        env = {name: value for name, value in env.items() if name != BCAST}
    job_id, size = int(env["SLURM_JOB_ID"]), job_size(env, by.mode if by is not None else "")
    open_to_owner()
    records = prepared(config, job_id)
    watches = observed is not None
    handover.alone(records, by, command, argv, started, say, observes=watches)
    job_log.begin(records, config)
    if reports(records):
        plan, env = remains(config, records, request, plan, nodes, env)
    deployment = start_code(config, records, command, env)
    if observed is None:
        warn(config, env, warning(command, config, env))
    command, request = as_paths(command, request, task_count(request, plan, nodes))
    command, kept, out, standby_output = take_output(command, request, env)
    command, out, carried = in_image(command, kept, out, config.task_python)
    options = TaskOptions(
        out,
        config.auto,
        config.progress_regex,
        request.pty,
        str(records or ""),
        config.standby_partition,
        config.requeue == "auto",
        size,
        config.checkpoint,
        config.checkpoint_bandwidth * 1e6,
        config.warm,
        tuple(filter(None, config.warm_packages.replace(",", " ").split())),
        config.outage_wait,
        config.slurm_wait,
        work_limit=config.stop_work_limit,
        suspend_limit=config.suspend_limit,
        task_start_limit=config.task_start_limit,
        checkpoint_interface=config.checkpoint_interface,
        restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
    )
    if observed is not None:
        options = observing(options, request)
    ranks = rank_env(command, request, env) | checkpoint_env(config) | {"ROBUST_NAN": config.nan}
    source = feed(request.input, os.isatty(0))
    if source is StdinFeed.FILE:
        standby_output += (f"--input={request.input}",)
    streams, bad = (kept, standby_output, ranks, source), request.kill_on_bad_exit
    launch = Launch(command, plan, options, *streams, observed, carried, bad)
    attempts = Attempts()
    while True:
        code = asyncio.run(supervise(config, launch, catalogue, deployment, attempts))
        if not attempts.again:
            return code
        try:
            plan, env = remains(config, records, request, plan, nodes, launch.env, attempts.lost)
        except UsageError as err:
            say(f"the step cannot be started with fewer nodes: {err}")
            return code
        launch = replace(launch, plan=plan, env=env)


def slurm_version(env: Mapping[str, str]) -> str:
    """Return the name and version of Slurm here, or why they are not known."""
    try:
        done = subprocess.run(
            ["srun", "--version"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SLURM_VERSION,
            check=False,
        )
    except FileNotFoundError:
        return "no Slurm: srun is not on PATH"
    except (OSError, subprocess.TimeoutExpired):
        return "Slurm: srun --version gives no answer"
    found = re.search(r"\d+\.\S+", done.stdout)
    if done.returncode or found is None:
        return "Slurm: srun --version fails here"
    return f"Slurm {found[0]}"


def warning_line(text: str) -> None:
    """Print a warning, for example of a setting that is ignored."""
    say(f"warning: {text}")


async def supervise(
    config: Config,
    launch: Launch,
    catalogue: Catalogue | None = None,
    deployment: Deployment | None = None,
    attempts: Attempts | None = None,
) -> int:
    code = await Supervisor(config, launch, Slurm(), catalogue, deployment, attempts).run()
    # All has ended: a signal that comes this late (a second Ctrl-C) must not change the exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, *TERMINATING})
    return code


def prepared(config: Config, job_id: int) -> Path | None:
    """The directory for the job's records; None, with a warning, where none can be had."""
    try:
        return prepare(config.state_dir, job_id)
    except StateDirError as err:
        say(
            f"warning: {err}; the job runs without records: robust-status does not show it, and "
            "bad nodes are not reported; if state_dir is wrong, set it (--robust-state-dir=DIR, "
            "ROBUST_STATE_DIR or robust.toml) to a directory that you can write on all nodes"
        )
        return None


def start_code(
    config: Config, records: Path | None, command: SrunCommand, env: Mapping[str, str]
) -> Deployment | None:
    """Take the snapshot that the job runs; None: the files as they are. Raises UsageError."""
    if not config.code:
        return None
    chdir = command.get("chdir")
    place = chdir.value if chdir is not None else None
    try:
        deployment, line = start_with_code(config, records, place, tuple(command.command), env)
    except CodeError as err:
        raise UsageError(f"--robust-code={config.code}: {err}") from None
    say(line)
    return deployment


def remains(
    config: Config,
    records: Path | None,
    request: StepRequest,
    plan: StepPlan,
    nodes: int,
    env: Mapping[str, str],
    lost: Collection[str] = (),
) -> tuple[StepPlan, Mapping[str, str]]:
    """Plan and environment for a job that may have lost nodes in an earlier step.

    ``lost``: nodes that do not start a task.
    """
    job_id = int(env["SLURM_JOB_ID"])
    own = env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    left = remaining_allocation(Slurm(), job_id, records, nodes, own, request.exclude, lost)
    if left is None:
        return plan, env
    per_node = env.get("SLURM_TASKS_PER_NODE")
    plan = fit(request, nodes, len(left.usable), config.spares, per_node)
    plan = replace(plan, options={**plan.options, **left.options})
    return plan, corrected(env, left.nodes)


def job_size(env: Mapping[str, str], plugin: str = "") -> dict[str, str]:
    """Return the size and script words that a copy of this job must have (see ``resubmit``).

    ``plugin``: the mode of ``sbatch --robust``.
    """
    size = {name: env[name] for name in SIZE if name in env}
    if plugin:
        size[handover.BY_PLUGIN] = plugin
    words = script_words(env)
    if words:
        size[SCRIPT_WORDS] = json.dumps(words[1:])
    return size


def rank_env(command: SrunCommand, request: StepRequest, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that srun would set for options that it does not get in the user's form."""
    given = command.get("job-name")
    name = given.value if given is not None else env.get("SLURM_JOB_NAME")
    found = {"SLURM_JOB_NAME": name or step_name(command.command)}
    if request.label and not request.pty:
        found["SLURM_LABELIO"] = "1"
    return found


def check_regex(config: Config) -> None:
    try:
        re.compile(config.progress_regex.encode())  # output is bytes
    except (re.error, UnicodeEncodeError) as err:
        raise UsageError(f"--robust-progress-regex={config.progress_regex!r}: {err}") from None


def signatures(config: Config) -> Catalogue:
    """Return the signatures of errors, the site's before ours. Raises UsageError."""
    named = config.signatures_file
    try:
        return load_signatures(Path(named).expanduser() if named else None)
    except CatalogueError as err:
        raise UsageError(
            f"signatures_file: {err}; correct the file (docs/diagnosis.md has its fields), or "
            "leave signatures_file empty"
        ) from None


def warn(config: Config, env: Mapping[str, str], kind: str = "") -> None:
    """Warn at the start of what does harm only later; ``kind``: the warning of the job's kind."""
    if kind:
        say(kind)
    script = batch_script(env)
    if script is not None and not has_no_kill(script, env):
        say(
            "warning: this job is not known to have --no-kill, so Slurm may end it when it sees "
            f"a lost node first; add this line to the script: {NO_KILL_LINE}"
        )


def take_output(
    command: SrunCommand, request: StepRequest, env: Mapping[str, str]
) -> tuple[SrunCommand, dict[str, str], OutputPlan, tuple[str, ...]]:
    """Take from srun what depends on task numbers (see ``sinks``).

    Returns the command and environment without it, the shims' part, and the output options that
    the srun of a standby node needs to write where the job's own srun does.
    """
    kept = dict(env)
    if request.pty:
        return command, kept, OutputPlan(), ()
    taken: dict[str, str] = {}
    only: dict[str, int] = {}
    standby_output: list[str] = []
    drop = ["label"] if request.label else []
    streams = (("output", request.output), ("error", request.error))
    for name, value in streams:
        mode = output_rules.parse_mode(value)
        if isinstance(mode, str) and output_rules.needs_task(mode):
            taken[name] = mode
        elif isinstance(mode, int):
            only[name] = mode
        elif value is not None:
            standby_output += [f"--{name}={value}", "--open-mode=append"]
            continue
        drop.append(name)
    if request.error is None:  # srun: stderr goes where stdout goes
        for found in (taken, only):
            if "output" in found:
                found["error"] = found["output"]  # type: ignore[assignment]
    for name, variables in OUTPUT_VARIABLES.items():
        if name in drop:
            for variable in variables:
                kept.pop(variable, None)
    plan = OutputPlan(
        label=request.label,
        unbuffered=request.unbuffered,
        append=request.open_mode in ("a", "append"),
        out=taken.get("output", ""),
        err=taken.get("error", ""),
        only_out=only.get("output"),
        only_err=only.get("error"),
    )
    return command.without(drop), kept, plan, tuple(standby_output)


if __name__ == "__main__":
    main()
