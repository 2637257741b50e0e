"""Ask Slurm, by a step of its own, which nodes of the job start tasks.

srun ends the whole step if one node does not take its task, whatever --no-kill says. Its message
goes straight to the user's stderr, so a second srun starts a small program, and its stderr is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from robust_slurm.slurm.values import expand
from srun_wrapper.command import steps
from srun_wrapper.command.srun_options import SrunCommand

ANSWER = 60.0  # s for srun to start a small program on all nodes, or to name those that cannot
NOT_THERE = 77  # exit code of the small program: no process of the job's step is on the node
UNREACHABLE = re.compile(
    r"communication connection failure|unable to contact|connection refused|no route to host"
    r"|connection timed out",
    re.IGNORECASE,
)
# Errors of Slurm itself that pass, whatever the step is.
PASSING = re.compile(
    r"job credential|unable to confirm allocation|socket timed out|zero bytes were transmitted"
    r"|standby mode|temporarily|authentication error|munge|" + UNREACHABLE.pattern,
    re.IGNORECASE,
)
_LAUNCH = re.compile(r"^srun: error: Task launch for .+ failed on node ([^\s:]+): (.+)$", re.M)
_EXITED = re.compile(
    rf"^srun: error: (\S+): tasks? [\d,-]+: Exited with exit code {NOT_THERE}$", re.M
)
# A process of the job's step, by the environment that Slurm has given it; or its slurmstepd, which
# may still set the step up: import a container's image.
_FIND = (
    r'grep -qsaz "^slurmstepd: \[$1\.$2\]" /proc/[0-9]*/cmdline && exit 0; '
    'for f in /proc/[0-9]*/environ; do grep -qsaz "^SLURM_JOB_ID=$1$" $f && '
    f'grep -qsaz "^SLURM_STEP_ID=$2$" $f && exit 0; done; exit {NOT_THERE}'
)
# Options that say how the user's tasks run, or that do not go together with --overlap.
_LEFT_OUT = frozenset(
    {
        *("bcast", "bcast-exclude", "error", "exclusive", "export", "export-file", "input"),
        *("job-name", "label", "mpi", "open-mode", "output", "pty", "quiet", "send-libs"),
        *("task-epilog", "task-prolog", "epilog", "prolog", "unbuffered", "verbose"),
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an srun that was to start a small program.

    ``started``: the program has run on all nodes. ``failed``: the reason by node that did not start
    it. ``empty``: the nodes on which no process of the job's step was found. ``passing``: an error
    of Slurm that passes.
    """

    started: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    passing: str = ""

    @property
    def dead(self) -> dict[str, str]:
        """The nodes that srun cannot even reach, with its words."""
        return {node: why for node, why in self.failed.items() if UNREACHABLE.search(why)}


def read_answer(code: int, text: str) -> Answer:
    """Read what the small step's srun printed (pure)."""
    failed = {name: found[2] for found in _LAUNCH.finditer(text) for name in expand(found[1])}
    empty = tuple(name for found in _EXITED.finditer(text) for name in expand(found[1]))
    lines = [line for line in text.splitlines() if PASSING.search(line)]
    passing = lines[0].removeprefix("srun: error: ") if lines and not failed else ""
    return Answer(code == 0, failed, empty, passing)


def ask_all(launch: steps.Launch) -> list[str]:
    """Return srun's words for a program that does nothing, started as the job's step would be."""
    command = launch.plan.apply(launch.command)
    drop = {o.name for o in command.srun if o.name in _LEFT_OUT or "container" in o.name}
    return [*_small(command.without(drop)), "true"]


def ask_for_step(nodes: Sequence[str], job_id: int, step_id: str) -> list[str]:
    """Return srun's words for a look for the processes of this step on these nodes."""
    own = SrunCommand((), {}, ())
    sizes = {"nodes": len(nodes), "ntasks": len(nodes), "ntasks-per-node": 1}
    for name, value in sizes.items():
        own = own.with_option(name, str(value))
    own = own.with_option("nodelist", ",".join(nodes))
    return [*_small(own), "sh", "-c", _FIND, "sh", str(job_id), step_id]


def _small(command: SrunCommand) -> list[str]:
    more = {"overlap": None, "no-kill": None, "kill-on-bad-exit": "0", "mpi": "none"}
    streams = {"input": "none", "output": "none", "error": "none", "job-name": "robust-ask"}
    for name, value in {**more, **streams}.items():
        command = command.with_option(name, value)
    return ["srun", *command.argv()]


async def ask(argv: Sequence[str], env: Mapping[str, str]) -> Answer | None:
    """Run srun and read its answer; None: it gave none in time."""
    process = await steps.start(
        argv,
        env,
        own_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, text = await asyncio.wait_for(process.communicate(), ANSWER)
    except TimeoutError:
        return None
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signum)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.wait(), 2.0)
    return read_answer(process.returncode or 0, text.decode(errors="replace"))
