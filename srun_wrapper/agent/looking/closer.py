"""The closer look at a few processes of a slot: the kernel's facts, and native stacks."""

from __future__ import annotations

from collections.abc import Sequence

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
        wanted = sorted(tree, key=lambda member: member.ticks)[-1:]
    found = []
    for member in wanted:
        shown = kernel.facts(member.pid), kernel.killed_children(member.pid)  # before a stop
        facts = "; ".join(text for text in shown if text)
        stack = reader.read(member.pid) if member.python else NativeStack()
        name = one_line(member.name, WORD)
        found.append(Closer(member.pid, name, facts, stack.frames, stack.failed, member.python))
    return tuple(found)
