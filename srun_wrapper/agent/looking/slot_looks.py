"""The looks at one slot's processes for which robust-srun asks, while its job makes no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from srun_wrapper.agent.looking.bounds import budget
from srun_wrapper.agent.looking.closer import CloserLook
from srun_wrapper.agent.looking.sampler import Sampler
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.closer_messages import LookCloser
from srun_wrapper.protocol.messages import Inspect, Inspected, Message


class SlotLooks:
    """Inspections and closer looks of one slot."""

    def __init__(
        self,
        loop: Loop,
        local: int,
        directory: Path,
        tree: Callable[[], list[int]],
        running: Callable[[], tuple[int, int]],
        emit: Callable[[Message], None],
    ) -> None:
        """``directory``: of the ranks' answers; ``tree``: the slot's processes; ``running``: the
        pid that the slot has started, 0 if none runs, and its epoch."""
        self._local = local
        self._running = running
        self._emit = emit
        self._sampler = Sampler(loop, directory, tree)
        self._closer = CloserLook(loop, directory, tree)
        self._budget = budget(1)

    def share(self, slots: int) -> None:
        """Set the number of slots that share the node's message."""
        self._budget = budget(slots)

    def inspect(self, order: Inspect) -> None:
        self._sampler.sample(
            self._local,
            self._running(),
            order.window,
            self._budget,
            lambda sample: self._emit(Inspected(order.token, order.window, (sample,))),
            ask=order.ask,
            quick=order.quick,
        )

    def closer(self, order: LookCloser) -> None:
        self._closer.inspect(self._local, self._running(), order, self._emit)

    def cancel(self) -> None:
        """End a closer look: something else is due."""
        self._closer.cancel()
