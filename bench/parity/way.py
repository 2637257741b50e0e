"""A way to run: a program, its surroundings, and what happens meanwhile; all of it data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lab import Lab


class Running(Protocol):
    """A run of a way, as an event sees it."""

    lab: Lab
    nodes: list[str]
    id: int

    @property
    def meta(self) -> Path:
        """The directory of its papers."""

    def rank(self, rank: int) -> int:
        """Return the pid of a rank's program."""

    def scontrol(self, *words: str) -> None:
        """Run scontrol as root."""


Happening = Callable[[Running], None]
"""An event during a run, which mends what it breaks before it returns."""

WIDE, ALONE, MOUNTS = "wide", "alone", "mounts"
"""The labs: many ways at once; one way at a time, for events that all nodes share; with a file
system in every node that stalls on command."""
TOY = "python {programs}/toy.py"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run that ends well under plain srun, or with an exit code that is defined.

    In all texts `{programs}` is the directory of the programs, a part of the shared file system,
    `{scratch}` the mount that stalls, `{launcher}` srun or robust-srun. The job's directory, in
    which it starts, is empty; what is in it at the end is the result, but for `ignore`.
    """

    name: str
    kind: str
    """The letter of the kind of trouble, A-H, or what varies: env, option, slurm, exit, user."""
    tells: str
    """The way, in one line."""
    program: str = TOY
    options: str = ""
    """Options of srun."""
    before: str = ""
    """Lines of the batch script before the launcher."""
    lines: str = "{launcher} {options} {program}"
    """The lines of the batch script that run it; their exit code counts."""
    sbatch: str = "--ntasks-per-node=1 --exclusive"
    jobs: int = 1
    """Number of times that the batch script runs (an array)."""
    nodes: int = 2
    full: str = ""
    """A file system of the nodes' own that is full, `/dev/shm` or `/tmp`."""
    happens: Happening | None = None
    after: float = 3.0
    """Seconds from the start of the first rank until it happens."""
    once: bool = False
    """The event is of the whole lab, so it happens once for both."""
    lab: str = WIDE
    heavy: bool = False
    """The program computes for seconds, so few of these run at a time."""
    seconds: float = 10.0
    """About how long it takes under srun."""
    code: int | None = 0
    """The exit code under srun, with another the way is void; None: the script does not end."""
    state: str = "COMPLETED"
    """The job's state at the end under srun."""
    out: bool = True
    """Compare the standard output, as sorted lines."""
    err: bool = False
    """Compare the standard error, less what Slurm and robust-srun say of themselves."""
    refusal: str = ""
    """An option that robust-srun may refuse instead, in a line that names it, within 5 s."""
    restarts: bool = False
    """The program fails in its midst, or a node is away: to start it again is what robust-srun is
    for, so the number of starts is not compared, but the nodes of the last starts are, and the time
    where it ends with 0."""
    ignore: tuple[str, ...] = ()
    """Patterns of files that differ from run to run."""
    long: bool = False
    """Left out by --quick."""
