"""Ending the step while nodes are silent: the nodes that answer do not wait for them."""

from __future__ import annotations

from collections.abc import Callable

from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState

SILENT = 5.0  # s for silent nodes to end their ranks after all the others have


class Ending:
    """Tracks which nodes can confirm that the step is being ended.

    ``doubted``: whether a node is so silent (at a monotonic time) that it may be lost.
    """

    def __init__(self, state: JobState, doubted: Callable[[Node, float], bool]) -> None:
        self._state = state
        self._doubted = doubted
        self.silent: list[Node] = []
        self.over = False
        """A signal ends the step, and no rank runs on a node that answers."""

    def look(self, now: float) -> None:
        state = self._state
        live = state.live()
        if not state.signalled and not any(n.signalled for n in live):
            return
        self.silent = [n for n in live if self._doubted(n, now)]
        silent = {id(n) for n in self.silent}
        state.note_ending(lambda node: id(node) not in silent)
        if state.signalled and not self.over:
            self.over = not any(
                rank.exit is None and not rank.node.gone and id(rank.node) not in silent
                for rank in state.world.by_rank.values()
            )
            if self.over:
                state.changed.set()

    def answers(self, node: Node) -> bool:
        """Return whether the node is not among the silent ones."""
        return not any(node is silent for silent in self.silent)

    async def wait_for_silent(self, ended: Callable[[], bool]) -> list[Node]:
        """Give ranks of silent nodes time to end while the step has not ``ended``.

        Returns the nodes that are still silent.
        """
        ranks = self._state.world.by_rank.values()

        def left() -> list[Node]:
            return [n for n in self.silent if any(r.node is n and r.exit is None for r in ranks)]

        await self._state.until(lambda: ended() or not left(), SILENT)
        return left()
