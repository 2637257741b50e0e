"""Nodes that do not start their ranks, in the first epoch as in every other.

One node that lags behind all others is replaced. Several are not: what they share is slow (a file
system, an image that every node loads), and the job waits for it, as under srun. To be late is no
evidence of a fault (one node may have to load what the others have): no node is reported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState

SHOWN = 8  # nodes that are named


def judge(
    late: int, nodes: int, waited: float, launch: float, limit: float
) -> Literal["wait", "tell", "lose"]:
    """Decide on ``late`` of ``nodes`` nodes that have not started their ranks (pure).

    ``launch``: seconds that a node has (``launch_limit``). ``limit``: seconds after which late
    nodes are lost even if they share a cause.
    """
    if not late or waited < launch:
        return "wait"
    if waited >= max(launch, limit) or (late == 1 and nodes > 1):
        return "lose"
    return "tell"


class LaunchWatch:
    """Looks at each epoch's start; ``say`` prints one line for people."""

    def __init__(
        self,
        state: JobState,
        say: Callable[[str], None],
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        """``excused``: whether processes wait for a file system that does not answer."""
        self._state = state
        self._say = say
        self._excused = excused
        self._held = 0.0  # time until which late nodes were excused
        self._told = 0  # the epoch for which the message was printed

    def look(self, now: float) -> None:
        state, world = self._state, self._state.world
        if self._excused():
            self._held = now
        waited = now - max(state.pace.epoch_since, self._held)
        launch = state.config.launch_limit
        if waited < launch or world.all_started():
            return
        late = {
            id(rank.node): rank.node
            for rank in world.by_rank.values()
            if not (rank.started or rank.exit or rank.node.gone)
        }
        verdict = judge(len(late), len(world.places), waited, launch, state.config.stall_limit)
        if verdict == "lose":
            for node in late.values():
                why = f"did not start its ranks in {waited:.0f} s"
                state.lose(node, why, shared=True)
        elif verdict == "tell" and self._told != world.epoch:
            self._told = world.epoch
            limit = max(launch, state.config.stall_limit)
            self._say(
                f"{_names(late.values())} of {len(world.places)} nodes have not started their "
                f"ranks after {waited:.0f} s: waiting for up to {limit:g} s. Look at what "
                "they share: the file systems of the program and its interpreter. If they are "
                "only slow, raise launch_limit"
            )


def _names(nodes: Collection[Node]) -> str:
    names = [node.name for node in nodes]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} ({', '.join(names[:SHOWN])}{more})"
