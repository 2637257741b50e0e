"""The processes below a slot, and the role of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm import process_stat
from robust_slurm.record import BeatReader, scan
from srun_wrapper.agent.processes.surroundings import environ_of
from srun_wrapper.protocol.looking_messages import LAUNCHER, LOADER, OTHER, RANK, Look, ThreadStack

MOST = 48  # processes of a slot that are looked at
TORCHRUN = "TORCHELASTIC_RUN_ID"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", TORCHRUN)
ENVIRON = 256 << 10  # bytes of an environment that are read
WORKER_LOOP = "_worker_loop ("


@dataclass(frozen=True, slots=True)
class TreeProcess:
    """One process of a slot's tree; ``environ`` has the ``NAMES`` that it started with."""

    pid: int
    parent: int
    state: str
    python: bool
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    ticks: int = 0  # of processor time

    def number(self, name: str) -> int:
        """Return a number of its environment; -1 if there is none."""
        value = self.environ.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 9 else -1

    def seen(self, role: str, stacks: tuple[ThreadStack, ...], failed: str) -> Look:
        numbers = self.number("RANK"), self.number("LOCAL_RANK")
        return Look(self.pid, role, self.state, *numbers, stacks, failed)


def members(tree: Sequence[int], root: int) -> list[TreeProcess]:
    """Read the processes of a tree; those that end meanwhile are left out."""
    found = []
    for pid in tree:
        try:
            process = process_stat.read(pid)
        except (OSError, ValueError):
            continue
        if process.state not in "ZX":
            python = _is_python(pid)
            own = environ_of(pid, ENVIRON) if python or pid == root else {}
            environ = {name: own[name] for name in NAMES if name in own}
            parent, state = process.parent, process.state
            found.append(
                TreeProcess(pid, parent, state, python, environ, process.name, process.ticks)
            )
    return found


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def steppers(directory: Path, epoch: int) -> frozenset[int]:
    """Return the pids of the processes of a node that have claimed a heartbeat record."""
    pids = set()
    for path in scan(str(directory), epoch).values():
        reader = BeatReader(path)
        beat = reader.read()
        reader.close()
        pids.add(beat.pid if beat is not None else 0)
    return frozenset(pids - {0})


def roles(
    tree: Sequence[TreeProcess], root: int, stepping: Collection[int] = frozenset()
) -> dict[int, str]:
    """Return the role of each Python process below a slot, the ranks first, then its launcher.

    ``tree``: parents before children; ``root``: the process that the slot has started;
    ``stepping``: see ``steppers``. The ranks are torchrun's, which robust-task may have forked
    itself; else the processes that make steps; else those with another place in the world than the
    root's; else the first Python process at or below the root. A worker of a DataLoader is known by
    its stack only: it is among the others here.
    """
    by_pid = {member.pid: member for member in tree}
    pythons = [member for member in tree if member.python]
    found = _inner(pythons, by_pid.get(root), stepping)
    own = {member.pid for member in found}
    found = [m for m in found if own.isdisjoint(_above(m, by_pid))]
    ranks = {m.pid: RANK for m in sorted(found, key=lambda m: m.number("LOCAL_RANK"))}
    rest = [m for m in pythons if m.pid not in own and own.isdisjoint(_above(m, by_pid))]
    rest.sort(key=lambda m: m.pid != root and root not in _above(m, by_pid))
    for member in rest[:1]:
        if not ranks or member.pid == root or root in _above(member, by_pid):
            ranks[member.pid] = LAUNCHER if ranks else RANK
    return ranks | {m.pid: OTHER for m in pythons if m.pid not in ranks}


def _inner(
    pythons: Sequence[TreeProcess], top: TreeProcess | None, stepping: Collection[int]
) -> list[TreeProcess]:
    """Return the ranks, and those of their children that look like them."""
    if top is None:
        return []
    if TORCHRUN not in top.environ and (found := [m for m in pythons if TORCHRUN in m.environ]):
        return found
    if found := [m for m in pythons if m.pid in stepping]:
        return found
    return [m for m in pythons if _differs(m, top)]


def _differs(member: TreeProcess, top: TreeProcess) -> bool:
    place = [member.environ.get(name) for name in NAMES]
    return place[0] is not None and place != [top.environ.get(name) for name in NAMES]


def _above(member: TreeProcess, by_pid: Mapping[int, TreeProcess]) -> set[int]:
    found: set[int] = set()
    above = by_pid.get(member.parent)
    while above is not None and above.pid not in found:
        found.add(above.pid)
        above = by_pid.get(above.parent)
    return found


def is_stopped(tree: Sequence[TreeProcess], ranks: Collection[int]) -> bool:
    """Return whether a slot's rank is stopped (state T).

    ``ranks``: pids of its Python ranks. A stopped helper of theirs stops no rank. A program without
    Python is stopped if all of it is, but for the processes that wait for the stopped ones.
    """
    halted = {member.pid for member in tree if member.state == "T"}
    if ranks:
        return not halted.isdisjoint(ranks)
    by_pid = {member.pid: member for member in tree}
    waiting = {pid for member in tree if member.pid in halted for pid in _above(member, by_pid)}
    return bool(halted) and halted | waiting >= by_pid.keys()


def seen_role(role: str, stacks: Sequence[ThreadStack]) -> str:
    """Return the role of a process whose stacks are known."""
    if role == OTHER and any(f.startswith(WORKER_LOOP) for s in stacks[:1] for f in s.frames):
        return LOADER
    return role
