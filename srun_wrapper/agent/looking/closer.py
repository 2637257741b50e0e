"""The closer look at a slot: flight recorders of its ranks, and a few processes in depth.

It gives way to everything: an inspection, a signal or a stop cancels it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from robust_slurm import process_stat
from robust_slurm.text import one_line
from srun_wrapper.agent.looking import kernel, recorders
from srun_wrapper.agent.looking.native import NativeReader, NativeStack
from srun_wrapper.agent.looking.roles import TreeProcess, members
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.closer_messages import Closer, LookCloser, LookedCloser

MOST = 3  # processes of a slot
WORD = 32  # characters of a process's name


class CloserLook:
    """Looks at one slot's processes in a thread; at most one look at a time."""

    def __init__(self, loop: Loop, directory: Path, tree: Callable[[], list[int]]) -> None:
        """``directory``: of the ranks' sockets; ``tree``: the slot's processes."""
        self._loop = loop
        self._directory = directory
        self._tree = tree
        self._reader = NativeReader()

    def inspect(
        self,
        local: int,
        running: tuple[int, int],
        order: LookCloser,
        done: Callable[[LookedCloser], None],
    ) -> None:
        """``running``: the pid that the slot has started, 0 if none runs, and its epoch."""
        self.cancel()
        pid, epoch = running
        nothing = LookedCloser(order.token, local)
        if pid <= 0:
            done(nothing)
            return
        reader = self._reader = NativeReader()
        tree, directory = self._tree(), self._directory

        def work() -> LookedCloser:
            found = () if order.pids else recorders.read_all(directory, epoch, tree)
            processes = _processes(members(tree, pid), order.pids, reader)
            return LookedCloser(order.token, local, found, processes)

        self._loop.run_in_thread(work, done, nothing)

    def cancel(self) -> None:
        """End a look at native stacks now, so that the process looked at goes on."""
        self._reader.cancel()


def _processes(
    tree: Sequence[TreeProcess], pids: Sequence[int], reader: NativeReader
) -> tuple[Closer, ...]:
    """Look at the processes of ``pids``. If that is () and no process is Python, look at the one
    that used the most CPU time."""
    wanted = [member for member in tree if member.pid in pids][:MOST]
    if not pids and not any(member.python for member in tree):
        wanted = sorted(tree, key=lambda member: _ticks(member.pid))[-1:]
    found = []
    for member in wanted:
        facts = kernel.facts(member.pid)  # before py-spy stops it
        stack = reader.read(member.pid) if member.python else NativeStack()
        found.append(
            Closer(member.pid, _name(member.pid), facts, stack.frames, stack.failed, member.python)
        )
    return tuple(found)


def _ticks(pid: int) -> int:
    try:
        return process_stat.read(pid).ticks
    except (OSError, ValueError):
        return -1


def _name(pid: int) -> str:
    try:
        return one_line(process_stat.read(pid).name, WORD)
    except (OSError, ValueError):
        return ""
