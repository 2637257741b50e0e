"""Choose for every rank the store that gets its replica, and keep room on idle nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

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
from srun_wrapper.protocol.checkpoint_messages import MakeRoom, ReplicaTargets


class Replicas:
    """Places replicas once per epoch, when all ranks have enrolled."""

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
        """The losses that the replicas survive, for people."""
        self.copies: dict[str, frozenset[str]] = {}
        """For each node those that keep the replicas of its ranks, as placed last; itself if none.
        Empty without snapshots."""
        self.placed = 0
        """Epoch whose replicas have been placed."""
        self._roomy: set[AgentKey] = set()  # idle nodes that were ordered to make room
        self._placing: asyncio.Task[None] | None = None

    def place_all(self) -> None:
        """Place the replicas if all ranks are there and it was not done in this epoch."""
        epoch = self._state.world.epoch
        if len(self._enrolments.here) >= self._enrolments.world and self.placed != epoch:
            self.placed = epoch
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
        survives = survival(holders, names, mesh, leaf)
        if survives != self.survives:
            self.survives = survives
            size = max(e.said.size for e in ranks.values())
            where = self._enrolments.directory or "nowhere (set checkpoint_dir)"
            text = (
                f"checkpoints: every step in memory, about {megabytes(size)} a rank; "
                f"replicas survive the loss of {survives}; on disk: {where}"
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
