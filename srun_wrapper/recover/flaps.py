"""Probe nodes that were given up as unreachable, to see if they answer again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from robust_slurm.slurm.values import fold
from srun_wrapper.decide.flaps import NO_REBOOT, WINDOW, Flap
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.report import say
from srun_wrapper.protocol.server import probe
from srun_wrapper.start_task import start_task

LOOK = 0.5  # s between two looks
ANSWER = 0.75  # s for a kernel to answer


def may_return(nodes: Iterable[Node], now: float, most: float) -> float:
    """Return for how many seconds more one of the lost nodes may be taken for only cut off.

    ``most``: s since its last word. A node whose kernel answers is not cut off.
    """
    lost = (node for node in nodes if node.gone and node.silent_as is not None)
    cut_off = (n.last_word for n in lost if n.silence is None or n.silence.kind == "unreachable")
    return max(0.0, max(cut_off, default=-math.inf) + most - now)


class Flaps:
    """Probes nodes that were given up for a while, and remembers those that answered again.

    Whatever its kernel answers counts, a refusal as well: Slurm ends what is left of the step there
    as soon as it reaches the node.
    """

    def __init__(self, healed: Callable[[Node, Flap], None]) -> None:
        """``healed``: called when a node that is watched answers within ``NO_REBOOT`` seconds."""
        self._healed = healed
        self._last: dict[str, Flap] = {}  # by the node's name
        self._watches: set[asyncio.Task[None]] = set()

    def before(self, name: str, now: float) -> Flap | None:
        """Return the node's last flap, if it is recent."""
        flap = self._last.get(name)
        return flap if flap is not None and now - flap.until <= WINDOW else None

    def note(self, name: str, flap: Flap) -> None:
        self._last[name] = flap

    def watch(self, node: Node, since: float) -> None:
        """Look whether the node answers again; ``since``: its last word."""
        if time.monotonic() - since < NO_REBOOT:
            start_task(self._watches, self._watch(node, since), node.name)

    async def _watch(self, node: Node, since: float) -> None:
        while (asked := time.monotonic()) - since < NO_REBOOT:
            if await probe(node.address, node.hello.probe_port, ANSWER) != "unreachable":
                now = time.monotonic()
                if now - since < NO_REBOOT:  # this process may have been held up
                    self._healed(node, Flap(since, now))
                return
            await asyncio.sleep(max(0.0, asked + LOOK - time.monotonic()))

    async def over(self) -> None:
        """Wait until no node is watched any more."""
        if self._watches:
            await asyncio.wait(self._watches)

    async def close(self, hurried: Callable[[], bool]) -> None:
        """Wait for all watches, ``NO_REBOOT`` s from a node's last message, or until ``hurried()``.

        The job is over by then. A report that stands now is final.
        """
        if self._watches and not hurried():
            names = fold(sorted({watch.get_name() for watch in self._watches}))
            say(
                f"waiting up to {NO_REBOOT:g} s for an answer of {names}: a node that answers "
                "before it could have booted was only cut off, and is not held to be bad"
            )
        while self._watches and not hurried():
            await asyncio.wait(self._watches, timeout=LOOK)
        for watch in self._watches:
            watch.cancel()
