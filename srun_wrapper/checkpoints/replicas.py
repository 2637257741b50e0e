"""Choose for every rank the store that gets its replica, and keep room on idle nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from robust_slurm.checkpoint.format.sizes import megabytes
from robust_slurm.checkpoint.planning import placement
from robust_slurm.checkpoint.planning.survival import copies
from robust_slurm.checkpoint.planning.survival import survives as survival
from robust_slurm.checkpoint.store.events import Target
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.job.model import AgentKey, Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import MakeRoom, ReplicaTargets, Saved

UNCONFIRMED = 30.0  # s for the first replicas to arrive; those that have not are then not counted
SETTLED = 10.0  # s that a change of the replicas must last before it is reported


class Placement(NamedTuple):
    """The places at which the replicas of an epoch are to be."""

    holders: placement.Holders
    nodes: list[str]
    mesh: Mapping[str, int]
    leaf: Mapping[str, str]
    size: int  # bytes of the largest snapshot, by estimate


class Replicas:
    """Places replicas once per epoch, when all ranks have enrolled; reports those that arrived."""

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        journal: Journal,
        leaves: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        """``leaves``: return the leaf switch of each node, as far as known."""
        self._state = state
        self._enrolments = enrolments
        self._journal = journal
        self._leaves = leaves
        self.survives = ""
        """The losses that the replicas survive, for people; "" while none is known to be whole."""
        self.copies: dict[str, frozenset[str]] = {}
        """For each node those that keep the replicas of its ranks; itself if none. As placed, and
        once it is known which replicas are whole, only those. Empty without snapshots."""
        self.placed = 0
        """Epoch whose replicas have been placed."""
        self._roomy: set[AgentKey] = set()  # idle nodes that were ordered to make room
        self._placing: asyncio.Task[None] | None = None
        self._plan: Placement | None = None
        self._pending: set[int] = set()  # ranks of which it is not known whether a replica is whole
        self._bare: set[int] = set()  # ranks whose newest snapshot has no replica
        self._reported = False  # in this epoch
        self._changed_at: float | None = None  # since when ``survives`` may be out of date
        self._saving_since = 0.0  # in this epoch

    def place_all(self) -> None:
        """Place the replicas if all ranks are there and it was not done in this epoch."""
        epoch = self._state.world.epoch
        if len(self._enrolments.here) >= self._enrolments.world and self.placed != epoch:
            self.placed = epoch
            self._plan = None
            self._placing = asyncio.create_task(self._place())

    async def _place(self) -> None:
        try:
            await self._place_all()
        except Exception as err:  # noqa: BLE001 - nobody reads the exception of a task
            say(f"checkpoints: no replicas: internal error: {type(err).__name__}: {err}")

    async def _place_all(self) -> None:
        leaf = await self._leaves()
        epoch = self._state.world.epoch
        ranks = {r: e for r, e in self._enrolments.ranks.items() if e.epoch == epoch}
        world = max(ranks, default=-1) + 1
        if sorted(ranks) != list(range(world)):
            return  # another epoch has begun
        names = [ranks[r].at.node.name for r in range(world)]
        mesh = ranks[0].said.mesh
        if any(e.said.mesh != mesh for e in ranks.values()):
            say("checkpoints: the ranks pass different meshes; replicas ignore parallel groups")
            mesh = {}
        holders = placement.place(names, mesh, leaf)
        orders: dict[int, tuple[Node, dict[int, Target | None]]] = {}
        for owner, holder in enumerate(holders):
            node = ranks[owner].at.node
            to = ranks[holder].at if holder is not None else None
            port = to.node.stores.get(to.local, 0) if to is not None else 0
            target = None
            if to is not None and holder is not None and port:
                host = to.node.store_host or to.node.address
                target = Target(holder, host, port, to.node.name)
            orders.setdefault(id(node), (node, {}))[1][owner] = target
        for node, targets in orders.values():
            self._state.bus.send(node, ReplicaTargets(targets))
        self.copies = copies(holders, names)
        size = max(e.said.size for e in ranks.values())
        self._plan = Placement(holders, names, mesh, leaf, size)
        placed = {owner for _, targets in orders.values() for owner, to in targets.items() if to}
        self._pending, self._bare = placed, set(range(world)) - placed
        self._reported, self._changed_at, self._saving_since = False, None, 0.0

    def heard(self, saved: Saved) -> None:
        """Note whether the replica of a rank's newest snapshot is whole."""
        if self._plan is None or saved.epoch != self.placed:
            return
        now, rank = time.monotonic(), saved.rank
        self._saving_since = self._saving_since or now
        # A step without its replica is safe only if the replica cannot be had.
        whole = saved.replicated is not None and saved.replicated >= min(saved.step, saved.safe)
        if not whole and saved.safe < saved.step:
            return  # it is on its way
        changed = whole == (rank in self._bare) or rank in self._pending
        self._pending.discard(rank)
        (self._bare.discard if whole else self._bare.add)(rank)
        if changed:
            self._changed_at = now
            self.look(now)

    def look(self, now: float) -> None:
        """Report the losses that the replicas survive, once it is known which of them are whole."""
        plan, saving = self._plan, self._saving_since
        if plan is None or not saving or (self._pending and now - saving < UNCONFIRMED):
            return
        if self._reported and (self._changed_at is None or now - self._changed_at < SETTLED):
            return
        self._reported, self._changed_at = True, None
        without = self._bare | self._pending
        there = tuple(None if r in without else to for r, to in enumerate(plan.holders))
        self.copies = copies(there, plan.nodes)
        survives = survival(there, plan.nodes, plan.mesh, plan.leaf)
        if survives == self.survives:
            return
        self.survives = survives
        if len(without) == len(there):
            kept = "no replica is on another node: a lost node costs the steps since the last "
            kept += "durable checkpoint"
        elif survives.startswith("not "):
            kept = f"replicas do not survive the loss of {survives.removeprefix('not ')}"
        else:
            kept = f"replicas survive the loss of {survives}"
        where = self._enrolments.directory or "nowhere (set checkpoint_dir)"
        text = (
            f"checkpoints: every step in memory, about {megabytes(plan.size)} a rank; {kept}; "
            f"on disk: {where}"
        )
        say(text)
        self._journal.event("checkpoints", text=text)

    def make_room(self) -> None:
        """Order idle nodes to make room for the snapshots that they would have to fetch."""
        waiting = [n for n in self._state.spares() if n.stores and n.key not in self._roomy]
        here, saved = self._enrolments.here, self._enrolments.saved
        all_here = here and self.placed == self._state.world.epoch
        if not waiting or not all_here or len(saved) < len(here):
            return  # it is not known yet how large snapshots are, or who needs which
        needs: dict[str, set[int]] = {}
        for rank in here:
            each = self._enrolments.ranks[rank]
            needs.setdefault(each.at.name, set()).update(each.said.needs)
        most = max(map(len, needs.values()))
        for node in waiting:
            self._roomy.add(node.key)
            self._state.bus.send(node, MakeRoom(self._enrolments.largest, most))
