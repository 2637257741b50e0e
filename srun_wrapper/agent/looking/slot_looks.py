"""The looks at one slot's processes for which robust-srun asks, while its job makes no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from srun_wrapper.agent.looking import sampler
from srun_wrapper.agent.looking.bounds import budget
from srun_wrapper.agent.looking.recorders import read_all
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser
from srun_wrapper.protocol.messages import Inspect, Inspected, Message, SlotActivity


class SlotLooks:
    """Inspections and closer looks of one slot, in threads."""

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
        self._loop = loop
        self._local = local
        self._directory = directory
        self._tree = tree
        self._running = running
        self._emit = emit
        self._budget = budget(1)

    def share(self, slots: int) -> None:
        """Set the number of slots that share the node's message."""
        self._budget = budget(slots)

    def inspect(self, order: Inspect) -> None:
        local, (pid, epoch) = self._local, self._running()

        def done(sample: SlotActivity) -> None:
            self._emit(Inspected(order.token, order.window, (sample,)))

        if pid <= 0:
            done(SlotActivity(local, "", 0.0, 0))
            return
        tree, most, directory = self._tree(), self._budget, self._directory

        def work() -> SlotActivity:
            if order.quick:
                return sampler.glance(local, pid, epoch, tree, most, directory)
            return sampler.sample(local, pid, epoch, tree, order.window, most, directory, order.ask)

        # Not known is "R": it must not count as quiet.
        self._loop.run_in_thread(work, done, SlotActivity(local, "R", 0.0, 0))

    def closer(self, order: LookCloser) -> None:
        pid, epoch = self._running()
        nothing = LookedCloser(order.token, self._local)
        if pid <= 0:
            self._emit(nothing)
            return
        tree, directory = self._tree(), self._directory

        def work() -> LookedCloser:
            return LookedCloser(order.token, self._local, read_all(directory, epoch, tree))

        self._loop.run_in_thread(work, self._emit, nothing)
