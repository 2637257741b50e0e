"""Shared file systems that do not answer, as the supervisor sees them.

While one does not answer, ranks cannot start, step or end, and no node is to blame for it: the
clocks of recovery stand still, for at most ``stall_limit`` seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from robust_slurm.slurm.values import fold
from srun_wrapper.job.changes import Changes
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.report import say

SETTLE = 1.5  # s for other nodes to report the same
AGAIN = 60.0  # s until it is said again


class Stalls:
    """Stalls that nodes report (``Node.stalled``): shown to the user; the nodes are not blamed."""

    def __init__(
        self,
        members: Membership,
        changed: Changes,
        limit: float,
        say: Callable[[str], None] = say,
        disturbed: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        """``limit``: see ``stall_limit``.

        ``disturbed``: when nodes were last silent by a shared cause, or this process slept.
        """
        self._members = members
        self._changed = changed
        self._limit = limit
        self._disturbed = disturbed
        self._say = say
        self._told: dict[str, tuple[float, float]] = {}  # mount -> since, last said
        self._nodes: dict[str, set[str]] = {}  # mount -> names of the nodes told of
        # Called ahead of need: it imports modules, perhaps from the file system that will stall.
        threading.Thread(target=_folded, args=({"n1", "n2"},), daemon=True).start()

    def standing(self) -> bool:
        """True if a file system in use does not answer, and its limit for waiting is not over."""
        oldest = time.monotonic() - self._limit
        nodes = self._members.live()
        return any(since > oldest for node in nodes for since in node.stalled_at.values())

    async def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait as ``Changes.until`` does; count the time anew after each stall or disturbance."""
        began = time.monotonic()
        while not await self._changed.until(ready, began + seconds - time.monotonic()):
            if self.standing():
                await self._changed.until(lambda: ready() or not self.standing(), self._limit)
                began = time.monotonic()
            elif self._disturbed() > began:
                began = self._disturbed()
            else:
                return False
        return True

    def look(self, now: float) -> None:
        """Print new stalls and those that are over; called all the time."""
        found: dict[str, list[Node]] = {}
        for node in self._members.live():
            for mount in node.stalled:
                found.setdefault(mount, []).append(node)
        for mount, nodes in found.items():
            since = min(node.stalled_at[mount] for node in nodes)
            if mount not in self._told:
                if now - since >= SETTLE:
                    self._tell(mount, nodes, now, since)
            elif now - self._told[mount][1] >= AGAIN:
                self._tell(mount, nodes, now, since)
        for mount in set(self._told) - set(found):
            since, _ = self._told.pop(mount)
            where, waited = _folded(self._nodes.pop(mount)), now - since
            self._say(f"file system {mount} answers again on {where} after {waited:.0f} s")

    def _tell(self, mount: str, nodes: list[Node], now: float, since: float) -> None:
        first = mount not in self._told
        self._told[mount] = (since, now)
        names = self._nodes.setdefault(mount, set())
        names |= {node.name for node in nodes}
        starting = any(node.starting for node in nodes)
        what = "processes cannot start" if starting else "ranks wait"
        where = _folded({node.name for node in nodes})
        waited = now - since
        text = f"{what} on {where}: file system {mount} does not answer"
        if first:
            text += f"; waiting for up to {self._limit:g} s (stall_limit), no node is blamed for it"
        else:
            text += f" since {waited:.0f} s"
        self._say(text)


def own_mounts(node: Node, nodes: Iterable[Node]) -> list[str]:
    """Return the file systems that do not answer on this node alone of several.

    That is no evidence against the node: the others may not use them.
    """
    others = [other for other in nodes if other is not node]
    shared = {mount for other in others for mount in other.stalled}
    return [mount for mount in node.stalled if others and mount not in shared]


def _folded(names: set[str]) -> str:
    return fold(sorted(names))
