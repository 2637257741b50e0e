"""The one way to begin an epoch: the first start, every restart, and the checks between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.job.facts import JobFacts
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.rejoining import may_go_on
from srun_wrapper.orders.starting import start_orders
from srun_wrapper.protocol.messages import Signal


@dataclass(frozen=True, slots=True)
class Begun:
    """An epoch whose ranks have been told to start."""

    reason: str  # "" where no failure is the reason
    step: int  # that the ranks resume at; 0: from nothing, or from an unknown step
    from_memory: bool


class Epochs:
    """Begins epochs; ``listeners`` are called once each has begun, in their order."""

    def __init__(self, state: JobState, facts: JobFacts, restoring: Restoring) -> None:
        self._state = state
        self._facts = facts
        self._restoring = restoring
        self.listeners: list[Callable[[Begun], None]] = []

    def start(self, reason: str) -> None:
        """Send every place its part of the next epoch, and the signals that wait for its ranks."""
        state, restoring = self._state, self._restoring
        extra = self._facts.rank_env(state.step_id)
        grace, restored = state.config.stop_grace, restoring.step
        rejoin = may_go_on(from_memory=restoring.from_memory, step=restored)
        orders = start_orders(state, grace, reason, extra, restored, restoring.of, rejoin)
        for node, order in orders:
            state.bus.send(node, order)
        for signum in sorted(state.early):
            for node in state.world.places:
                state.bus.send(node, Signal(signum, early=True))
        state.early.clear()
        begun = Begun(reason, restored or 0, restoring.from_memory)
        for listener in self.listeners:
            listener(begun)
