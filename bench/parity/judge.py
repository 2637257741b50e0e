"""The comparison of a run under robust-srun with the same under srun (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOWER, SLACK = 0.10, 5.0
"""A run may take so much longer than under srun, and so many seconds."""
SLOW = "slower: "
_CHATTER = re.compile(
    r"robust-srun: |robust-task: |slurmstepd|"
    r"srun: (Job \d+ step creation temporarily|Step created|Force Terminated|Job step aborted)|"
    r"srun: (forcing job termination|got SIG|launch/slurm: _step_signal: Terminating)|"
    r"srun: error: .*: (Killed|Terminated|Aborted|Segmentation|Exited with exit code)|"
    r"srun: error: IO: Hey, you told me node \d+ was down!"
)
"""Lines of standard error that Slurm and robust-srun write of themselves."""


@dataclass(frozen=True, slots=True)
class Remains:
    """The remains of a run."""

    code: int | None = 0
    """The exit code of the script's lines; None: they did not end."""
    state: str = "COMPLETED"
    seconds: float = 0.0
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    """The whole standard error."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files of the job's directory, and what is in them."""
    starts: tuple[tuple[int, str], ...] = ()
    """Each start of a rank: the rank, and the place of its node in the job's list of nodes."""
    scripts: int = 1
    """Number of times that the batch script began."""
    blamed: tuple[str, ...] = ()
    """Nodes that were reported, excluded, drained or replaced."""
    leftovers: tuple[str, ...] = ()


def own_lines(text: str) -> tuple[str, ...]:
    """Return the sorted lines of a standard error that the program wrote."""
    return tuple(sorted(line for line in text.splitlines() if not _CHATTER.match(line)))


def void(srun: Remains, code: int | None, state: str) -> str:
    """Return why a way proves nothing: srun itself did not end it as planned; "" if it did."""
    if (srun.code, srun.state) != (code, state):
        return f"under srun: exit code {srun.code} and {srun.state}, not {code} and {state}"
    return ""


def refused(robust: Remains, option: str) -> bool:
    """Report whether robust-srun refused an option, in one line and at once."""
    lines = [line for line in robust.said if "robust-srun: " in line]
    return bool(robust.code and len(lines) == 1 and option in lines[0] and robust.seconds < SLACK)


def worse(
    srun: Remains,
    robust: Remains,
    *,
    out: bool = True,
    err: bool = False,
    restarts: bool = False,
    refusal: str = "",
) -> list[str]:
    """Return what is worse under robust-srun; nothing: it is as good.

    ``restarts``: ranks may be started again, so the number of starts does not count. The nodes on
    which the ranks are in the end do, and so does the time of a program that ends well.
    """
    if refusal and refused(robust, refusal):
        return []
    found = []
    if robust.code != srun.code:
        lost = "never ended" if robust.code is None else f"exit code {robust.code}"
        found.append(f"{lost} instead of {srun.code}")
    if robust.state != srun.state:
        found.append(f"job {robust.state} instead of {srun.state}")
    if robust.scripts != srun.scripts:
        found.append(f"the script began {robust.scripts} times instead of {srun.scripts}")
    if restarts:
        if (last := _last_nodes(robust)) != (wanted := _last_nodes(srun)):
            found.append(f"ranks in the end on nodes {_set(last)} instead of {_set(wanted)}")
    elif len(robust.starts) > len(srun.starts):
        found.append(f"{len(robust.starts)} starts of ranks instead of {len(srun.starts)}")
    elif sorted(robust.starts) != sorted(srun.starts):
        found.append(f"ranks on {_places(robust)} instead of {_places(srun)}")
    found += _differences(srun.files, robust.files)
    if out and robust.out != srun.out:
        found.append(f"standard output: {_first(srun.out, robust.out)}")
    if err and robust.err != srun.err:
        found.append(f"standard error: {_first(srun.err, robust.err)}")
    timed = not (restarts and srun.code)
    if timed and robust.seconds > srun.seconds * (1 + SLOWER) + SLACK:
        found.append(f"{SLOW}{robust.seconds:.0f} s instead of {srun.seconds:.0f} s")
    return found


def only_slower(points: Sequence[str]) -> bool:
    """Report whether a run was worse in nothing but its time, for which another may be to blame."""
    return len(points) == 1 and points[0].startswith(SLOW)


def leftovers(srun: Remains, robust: Remains) -> list[str]:
    """Return what only robust-srun left."""
    left = list(robust.leftovers)
    for each in srun.leftovers:
        if each in left:
            left.remove(each)
    return left


def _last_nodes(run: Remains) -> set[str]:
    """Return the places of the nodes on which the ranks were started last."""
    return set(dict(run.starts).values())


def _set(places: set[str]) -> str:
    return " ".join(sorted(places)) or "none"


def _places(run: Remains) -> str:
    return " ".join(f"{rank}:{place}" for rank, place in sorted(run.starts)) or "no node"


def _differences(srun: Mapping[str, str], robust: Mapping[str, str]) -> list[str]:
    found = []
    if missing := sorted(srun.keys() - robust.keys()):
        found.append(f"files are missing: {' '.join(missing[:5])}")
    if more := sorted(robust.keys() - srun.keys()):
        found.append(f"files more: {' '.join(more[:5])}")
    other = sorted(name for name in srun.keys() & robust.keys() if srun[name] != robust[name])
    if other:
        found.append(f"another result: {' '.join(other[:5])}")
    return found


def _first(wanted: Sequence[str], got: Sequence[str]) -> str:
    missing = [line for line in wanted if line not in got]
    more = [line for line in got if line not in wanted]
    if missing:
        return f"{missing[0][:80]!r} is missing"
    if more:
        return f"{more[0][:80]!r} is more"
    return f"{len(got)} lines instead of {len(wanted)}"
