"""Starting the real srun steps: the job's own, and one per standby node."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from robust_slurm import commands
from robust_slurm.config import Config
from robust_slurm.slurm import Job
from robust_slurm.slurm.ask import STANDBY
from srun_wrapper.command.containers import CarriedPython
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import SrunCommand
from srun_wrapper.protocol.task_options import TaskOptions

# srun options that say how a task runs; a standby node's tasks must run the same way. All others
# say how many and where, which is decided anew.
TASK_OPTIONS = frozenset(
    {
        *("accel-bind", "chdir", "container", "container-id"),
        *("cpu-bind", "cpus-per-gpu", "cpus-per-task", "cores-per-socket", "export"),
        *("export-file", "gpu-bind", "gpus-per-task", "hint", "mem-bind", "mpi", "overcommit"),
        *("network", "profile", "propagate", "resv-ports", "send-libs", "slurmd-debug"),
        *("task-epilog", "task-prolog", "threads-per-core", "tmp", "tres-bind"),
        *("tres-per-task", "unbuffered", "euid", "pty", "wckey", "uenv"),
    }
)
PRIVATE = ("ROBUST_STEP_KEY", "ROBUST_PORT", "ROBUST_STANDBY_REQUEST")
_libc = ctypes.CDLL(None)
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Secrets for shims to find and trust the supervisor; passed by environment, never by argv."""

    key: bytes
    port: int

    def env(self, standby_request: int = 0) -> dict[str, str]:
        return {
            "ROBUST_STEP_KEY": self.key.hex(),
            "ROBUST_PORT": str(self.port),
            "ROBUST_STANDBY_REQUEST": str(standby_request),
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """The step to start, as the command line and Slurm's environment describe it."""

    command: SrunCommand
    plan: StepPlan
    options: TaskOptions
    env: Mapping[str, str]
    standby_output: tuple[str, ...] = ()  # srun options for a standby node's streams
    rank_env: Mapping[str, str] = field(default_factory=dict)  # what only our srun sees otherwise
    feed: StdinFeed = StdinFeed.EVERY
    observed: Config | None = None
    """Observe mode: the settings that a recovery would have; None: recover."""
    carried: CarriedPython | None = None
    """Our Python in the image in which srun starts the tasks; None: no image, or it has its own."""
    kill_on_bad: int | None = None
    """The user's --kill-on-bad-exit; None: KillOnBadExit of slurm.conf counts."""

    @property
    def stderr_apart(self) -> bool:
        """True if a rank's stderr goes to a file, or only another rank's is shown."""
        plan = self.options.output
        files = any(word.startswith(("--output=", "--error=")) for word in self.standby_output)
        only = plan.only_out is not None or plan.only_err is not None
        return files or only or bool(plan.out or plan.err)


def task_argv(
    python: str,
    options: TaskOptions,
    command: Sequence[str],
    carried: CarriedPython | None = None,
) -> list[str]:
    """Return the task's words; ``python``: the user's choice, "": ours, in an image ``carried``."""
    # -I: neither the user's PYTHONPATH nor files in the working directory can change the shim.
    module = "srun_wrapper.agent.task"
    if python:
        head = [python, "-I", *commands.words(module)]
    elif carried is not None:
        head = [*carried.words, "-I", f"{carried.package}/commands.py", module]
    else:
        head = [sys.executable, "-I", *commands.own_words(module)]
    return [*head, msgspec.json.encode(options).decode(), "--", *command]


def main_argv(command: SrunCommand, env: Mapping[str, str], *, observe: bool = False) -> list[str]:
    """srun's argv for the job's own step, without the task's own words.

    ``observe``: the step ends when the user's options say so.
    """
    command = with_export(command, env)
    if command.get("job-name") is None:  # the step is named after the user's program, not ours
        command = command.with_option("job-name", step_name(command.command))
    stays = () if observe else (("no-kill", None), ("kill-on-bad-exit", "0"))
    for name, value in stays:
        command = command.with_option(name, value)
    return ["srun", *command.argv()]


def step_argv(launch: Launch, python: str) -> list[str]:
    """Return srun's argv for the job's own step, with the task's words."""
    observe = launch.observed is not None
    argv = main_argv(launch.plan.apply(launch.command), launch.env, observe=observe)
    return argv + task_words(launch, python)


def task_words(launch: Launch, python: str) -> list[str]:
    return task_argv(python, launch.options, launch.command.command, launch.carried)


def step_name(words: Sequence[str]) -> str:
    """The name that srun gives a step without --job-name."""
    return words[0].rpartition("/")[2]


def with_export(command: SrunCommand, env: Mapping[str, str]) -> SrunCommand:
    """Add our variables to ``--export=NONE`` or a list, which would keep them from the shim.

    ``env``: srun's; ``sbatch --export=NONE`` leaves SLURM_EXPORT_ENV=NONE there.
    """
    option = command.get("export")
    if option is not None:
        export = option.value
    else:
        export = env.get("SRUN_EXPORT_ENV") or env.get("SLURM_EXPORT_ENV")
    if not export:
        return command
    words = export.split(",")
    if "ALL" in (word.upper() for word in words):
        return command
    kept = [word for word in words if word.upper() not in ("NONE", "NIL")]
    value = ",".join([*kept, *PRIVATE])
    return command.with_option("export", value)


def standby_job_name(job_id: int) -> str:
    """The name of the job's standby allocations."""
    return f"{STANDBY}{job_id}"


def standby_argv(
    launch: Launch, job: Job, partition: str, tasks: int, exclude: Sequence[str], minutes: int
) -> list[str]:
    """srun's argv for one node of the standby partition: allocation and step in one.

    An allocation that srun makes for itself ends with srun, so it can never outlive the job.
    """
    argv = ["srun", "--quiet", f"--partition={partition}", "--nodes=1", f"--ntasks={tasks}"]
    argv += [f"--ntasks-per-node={tasks}", "--exclusive", "--kill-on-bad-exit=0"]
    argv += [f"--time={minutes}", "--no-kill", *of_job(job), *_per_node(launch, job)]
    if exclude:
        argv.append("--exclude=" + ",".join(exclude))
    argv += launch.standby_output
    for option in with_export(launch.command, launch.env).srun:
        if option.name in TASK_OPTIONS or option.name.startswith("container-"):
            argv += option.words
    return argv


def of_job(job: Job) -> list[str]:
    """Return the options that mark a standby allocation as this job's."""
    argv = [f"--job-name={standby_job_name(job.id)}", f"--comment=robust: standby of job {job.id}"]
    for name, value in (("account", job.account), ("qos", job.qos)):
        if value and value not in ("(null)", "N/A"):
            argv.append(f"--{name}={value}")
    return argv


def _per_node(launch: Launch, job: Job) -> list[str]:
    """Options that request the job's share of each node again: GPUs, cores per task, all memory."""
    argv = ["--mem=0"]
    gpus = launch.env.get("SLURM_GPUS_ON_NODE", "")
    if job.tres_per_node:
        argv.append(f"--gres={job.tres_per_node}")
    elif gpus.isdigit() and int(gpus) > 0:
        argv.append(f"--gres=gpu:{gpus}")
    if job.cpus_per_task > 1 and launch.command.get("cpus-per-task") is None:
        argv.append(f"--cpus-per-task={job.cpus_per_task}")
    return argv


@functools.cache
def _program(name: str, path: str | None) -> str:
    return shutil.which(name, path=path) or name


async def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    own_session: bool,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> asyncio.subprocess.Process:
    """Start srun on our stdin, stdout and stderr, or those given; it gets SIGTERM when we die."""
    # Found once: a directory of PATH may be on a file system that does not answer any more.
    program = _program(argv[0], env.get("PATH"))
    return await asyncio.create_subprocess_exec(
        *argv,
        executable=program,
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_session,
        preexec_fn=_follow_parent,
    )


def raise_file_limit() -> None:
    """Raise the soft limit of open files: one connection per node can exceed it."""
    hard = _FILES[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _follow_parent() -> None:
    _libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_NOFILE, _FILES)  # srun hands our limits on to the ranks
