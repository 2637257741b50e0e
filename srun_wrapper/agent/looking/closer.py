"""The closer look at a few processes of a slot: the kernel's facts, and native stacks."""

from __future__ import annotations

from collections.abc import Sequence

from robust_slurm import process_stat
from robust_slurm.text import one_line
from srun_wrapper.agent.looking import kernel
from srun_wrapper.agent.looking.native import NativeReader, NativeStack
from srun_wrapper.agent.looking.roles import TreeProcess
from srun_wrapper.protocol.closer_messages import Closer

MOST = 3  # processes of a slot
WORD = 32  # characters of a process's name


def in_depth(
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
