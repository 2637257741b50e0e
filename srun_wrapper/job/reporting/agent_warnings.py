"""Warnings of robust-tasks: lines for the log, and what many ranks' streams have in common.

A file system that is full or gone befalls the output of all ranks at once. The first stream is
printed, then their number; the others' lines are not even in the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from robust_slurm.slurm.values import folded
from robust_slurm.text import counted, one_line
from srun_wrapper.job.reporting import job_log
from srun_wrapper.protocol.messages import Logged

COUNT_AFTER = 5.0  # s after the last new stream they are counted
FORGET = 600.0  # s without a line of a trouble until the next one is of another
AGAIN = 60.0  # s from one count to the next, or from the first stream after it
NAMES = 300  # characters for the names of nodes


@dataclass(slots=True)
class _Repeated:
    heard: float
    new: float  # when the last new stream was heard of
    first: float = math.inf  # when the first one was that is not told yet
    told: int = 1
    counted: float = -math.inf  # when these were told
    nodes: dict[str, str] = field(default_factory=dict)
    """Each text's node: a restarted rank repeats its text, maybe on another."""


class AgentWarnings:
    """``say`` prints a line to the user, and logs it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._repeated: dict[str, _Repeated] = {}

    def heard(self, now: float, node: str, message: Logged) -> None:
        """Log a line; print the first one of a trouble."""
        if not message.trouble:
            job_log.agent_said(node, message.level, message.text, message.dropped)
            return
        if message.trouble not in self._repeated:
            self._repeated[message.trouble] = _Repeated(now, now)
            self._say(f"warning: {node}: {message.text}")
        found = self._repeated[message.trouble]
        found.heard = now
        if message.text not in found.nodes:
            found.new = now
            found.first = now if len(found.nodes) == found.told else found.first
        found.nodes[message.text] = node

    def look(self, now: float) -> None:
        """Print how many there are of each trouble, when no more come."""
        for trouble, found in list(self._repeated.items()):
            count = len(found.nodes)
            over = now - found.new >= COUNT_AFTER or now - found.first >= AGAIN
            if count > found.told and over and now - found.counted >= AGAIN:
                found.told, found.counted = count, now
                nodes = set(found.nodes.values())
                where = f"{counted(len(nodes), 'node')} ({one_line(folded(nodes), NAMES)})"
                self._say(f"warning: {counted(count, 'stream')} of ranks on {where}: {trouble}")
            if now - found.heard >= FORGET:
                del self._repeated[trouble]
