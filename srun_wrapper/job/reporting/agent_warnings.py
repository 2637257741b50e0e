"""Warnings of robust-tasks: lines for the log, and what many ranks' streams have in common.

A file system that is full or gone befalls the output of all ranks at once. The first stream is
printed, then their number; the others' lines are not even in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from robust_slurm.text import counted
from srun_wrapper.job.reporting import job_log
from srun_wrapper.protocol.messages import Logged

COUNT_AFTER = 5.0  # s from the first line to the count
MORE = 10  # times as many as the last count: they are counted again


@dataclass(slots=True)
class _Repeated:
    since: float
    told: int = 1
    texts: set[str] = field(default_factory=set)  # an incarnation of a rank repeats the last one's
    nodes: set[str] = field(default_factory=set)


class AgentWarnings:
    """``say`` prints a line to the user, and logs it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._repeated: dict[str, _Repeated] = {}

    def heard(self, now: float, node: str, message: Logged) -> None:
        """Log a line; print the first one of a trouble."""
        if not message.trouble or message.dropped:
            job_log.agent_said(node, message.level, message.text, message.dropped)
        if not message.trouble:
            return
        if message.trouble not in self._repeated:
            self._repeated[message.trouble] = _Repeated(now)
            self._say(f"warning: {node}: {message.text}")
        found = self._repeated[message.trouble]
        found.texts.add(message.text)
        found.nodes.add(node)

    def look(self, now: float) -> None:
        """Print how many there are of each trouble, once and when they have become many more."""
        for trouble, found in self._repeated.items():
            count, first = len(found.texts), found.told == 1
            due = count > 1 if first else count >= MORE * found.told
            if due and now - found.since >= COUNT_AFTER:
                found.told = count
                where = counted(len(found.nodes), "node")
                self._say(f"warning: {counted(count, 'stream')} of ranks on {where}: {trouble}")
