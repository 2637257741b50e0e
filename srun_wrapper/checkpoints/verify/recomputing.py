"""Compute a step again, from the step before it and on other nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from robust_slurm.checkpoint.planning import plan as planner
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.checkpoints.verify.rules import Results, SeatState, exchange
from srun_wrapper.checkpoints.verify.standing import Standing
from srun_wrapper.command.input_rules import SPENT
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.stopping import Stopping

POLL = 0.05  # s; the report of a rank that stands wakes no waiter


class Recomputing:
    """Stops the ranks, seats them anew and starts them from an older state."""

    def __init__(
        self,
        state: JobState,
        standing: Standing,
        stores: Stores,
        restoring: Restoring,
        stopping: Stopping,
        journal: Journal,
        pod: Callable[[str], str],
        start_epoch: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> None:
        """``pod``: see Topology; ``start_epoch``: start all ranks, with this reason."""
        self._state = state
        self._standing = standing
        self._stores = stores
        self._restoring = restoring
        self._stopping = stopping
        self._journal = journal
        self._pod = pod
        self._start_epoch = start_epoch
        self.interrupted = interrupted
        """True if another failure or the end came in between."""
        self._from = math.inf  # a stop may lose signals that came since

    def begin(self, since: float) -> None:
        """Begin a check of ranks that have stood since ``since``."""
        self._from = since - (self._state.pace.step_time() or 0.0)

    async def results(self, step: int) -> Results:
        """Return the sums of all ranks' states; {} if some stores do not answer in time."""
        return await self._stores.sums(step, self._over)

    async def base(self, step: int) -> tuple[int, int] | None:
        """Return the newest step before this one that memory has whole, and its epoch."""
        places = await self._stores.stock(
            lambda: bool(self._state.failures) or self._state.signalled > 0
        )
        world = self._standing.world
        sets, _ = planner.usable(places, world)
        found = [
            key
            for key, copies in sets.items()
            if key[0] < step and key[1] == self._state.world.epoch and len(copies) == world
        ]
        return max(found, default=None)

    def exchanged(self) -> list[Node] | None:
        """Return another node for each place; None where there is none."""
        world, spares, pod = self._state.world, self._state.spares(), self._pod
        seats = [
            SeatState(node.name, node.slots, len(ranks), pod(node.name))
            for node, ranks in zip(world.places, world.ranks, strict=True)
        ]
        idle = [SeatState(node.name, node.slots, 0, pod(node.name)) for node in spares]
        names = exchange(seats, idle)
        known = {node.name: node for node in (*spares, *world.places)}
        return None if names is None else [known[name] for name in names]

    async def again(
        self, step: int, base: tuple[int, int], places: Sequence[Node]
    ) -> Results | None:
        """Have these nodes compute the step from ``base``; None if a failure or the end came."""
        if why := self.hindrance():
            self._journal.news(f"step {step} is not computed again: {why}")
            return {}
        if not await self.stop():
            return None
        lost = [n.name for n in places if n.gone or (n.role is Role.SPARE and not n.connection)]
        if lost:  # the ranks go back to the nodes that they had
            self._journal.news(f"step {step} is not computed again: {','.join(lost)} is lost")
            return {}
        self._state.members.seat(places)
        if not await self._restoring.prepare(base, step):
            return None
        if self._restoring.step != base[0]:
            return {}  # it could not be brought where it is needed
        self._standing.expect(step)
        self._start_epoch(f"step {step} is computed again to check it")
        while self._standing.where(time.monotonic()) == "wait" and not self.interrupted():
            await self._state.until(self._over, POLL)
            if self._state.world.all_exited():
                break
        if self.interrupted():
            return None
        return await self.results(step)

    def hindrance(self) -> str:
        """Reason why ranks that stand must not be stopped now, or they would lose something."""
        if self._state.passed_at >= self._from:
            return "the ranks received a signal that they may not have handled yet"
        if self.spent():
            return SPENT
        return "ranks have ended" if self._state.world.is_ending() else ""

    def spent(self) -> bool:
        """True if some rank has read more input than is kept for its next incarnation."""
        return any(not all(node.stdin.values()) for node in self._state.world.places)

    async def stop(self) -> bool:
        """End the ranks as a restart does; False if a failure or the end came."""
        state = self._state
        state.members.stop_epoch()
        staying = [node for node in state.world.places if node.role is Role.ACTIVE]
        await self._stopping.end_ranks(staying, self.interrupted)
        return not self.interrupted() and not state.vacant()

    async def resume(self, reason: str) -> None:
        """Start the ranks again where they were stopped, if they were."""
        if self._state.stopped() and await self._restoring.prepare():
            self._start_epoch(reason)

    def _over(self) -> bool:
        return self.interrupted() or self._state.world.all_exited()
