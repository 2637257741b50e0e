"""Bring what they lack to ranks that come up on other nodes than the restore plan expected.

A torchrun with a dynamic rendezvous (c10d, etcd-v2) numbers its nodes itself, by address, each time
anew: a node that takes the place of another may move those behind it. Their store lets them wait
for it (``robust_slurm/checkpoint/store/awaited.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from robust_slurm.checkpoint.planning import plan as planner
from srun_wrapper.checkpoints.enrolments import StoreAt
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.protocol.checkpoint_messages import Enrolled
from srun_wrapper.start_task import start_task

GATHER = 0.1  # s to wait for more such ranks, which are then served together

Failed = set[tuple[str, int, int]]
Fetch = Callable[[tuple[planner.Transfer, ...]], Awaitable[Failed]]


class LateArrivals:
    """Serves ranks for one plan after another. ``fetch``: see Stores; ``over``: give up."""

    def __init__(self, fetch: Fetch, over: Callable[[], bool], journal: Journal) -> None:
        self._fetch, self._over, self._journal = fetch, over, journal
        self._plan: planner.Resume | None = None
        self._expected: dict[int, str] = {}  # the node of each rank
        self._shards: Mapping[str, Mapping[int, str]] = {}  # what the plan brought to each node
        self._told: dict[str, set[int]] = {}  # owners that a store was told to get since
        self._ranks: list[tuple[int, planner.Seat, set[int]]] = []  # and what each has
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        plan: planner.Resume | None,
        seats: Mapping[int, planner.Seat],
        shards: Mapping[str, Mapping[int, str]],
    ) -> None:
        self._plan, self._shards = plan, shards
        self._expected = {rank: seat.node for rank, seat in seats.items()}
        self._told, self._ranks = {}, []

    def enrolled(self, at: StoreAt, said: Enrolled) -> None:
        """Note that a rank has come up, and bring what it lacks."""
        plan, node = self._plan, at.node.name
        if plan is None or self._expected.get(said.rank) == node:
            return
        seat = planner.Seat(at.name, node)
        told = self._told.setdefault(seat.store, set())
        here = told | self._shards.get(node, {}).keys()
        lacking = planner.late(plan, said.rank, seat, here)
        if not lacking:
            return
        if not any(self._told.values()):  # the first one
            self._journal.event("unexpected_seat", rank=said.rank, node=node)
        told.update(t.owner for t in lacking)
        self._ranks.append((said.rank, seat, here))
        if len(self._ranks) == 1:  # ten thousand may come at the same time
            start_task(self._tasks, self._gather(plan))

    async def _gather(self, plan: planner.Resume) -> None:
        await asyncio.sleep(GATHER)
        if self._plan is plan:
            ranks, self._ranks = self._ranks, []
            try:
                await self._bring(plan, ranks)
            except Exception as err:  # noqa: BLE001 - nobody reads the exception of a task
                text = f"{type(err).__name__}: {err}"
                say(
                    f"checkpoints: internal error; some ranks lack the snapshots to resume from: "
                    f"{text}"
                )

    async def _bring(
        self, plan: planner.Resume, ranks: list[tuple[int, planner.Seat, set[int]]]
    ) -> None:
        """Fetch what the ranks lack, from other sources where one fails."""
        failed: Failed = set()
        while self._plan is plan and not self._over():
            transfers: list[planner.Transfer] = []
            for rank, seat, here in ranks:
                lacking = planner.late(plan, rank, seat, here, failed)
                transfers += lacking
                here.update(t.owner for t in lacking)
            if not transfers:
                return
            failed |= await self._fetch(tuple(transfers))
            lost = {(t.target, t.owner) for t in transfers if (t.source, t.owner, t.step) in failed}
            for _, seat, here in ranks:
                here -= {owner for owner in here if (seat.store, owner) in lost}
