"""A job of four nodes that may go on with fewer, in one process: nodes are lost, and come."""

from __future__ import annotations

import time
from typing import Any

from checkpointed_job import CheckpointedJob
from made_job import made_launch, made_node
from plan_places import held

from robust_slurm.checkpoint.planning import plan as planner
from robust_slurm.checkpoint.planning.sound import NO_TRUST, Bound, Trust
from robust_slurm.checkpoint.store.events import Restore
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.model import Node, Role
from srun_wrapper.protocol.checkpoint_messages import StoreReady
from srun_wrapper.recover.resize.resizing import Resizing

ALL = (0, 1, 2, 3)


class Scene:
    """The job, with ``min_nodes`` 2 unless said; its ranks hold the same."""

    def __init__(self, *command: str, enrol: bool = True, mesh: Any = None, **config: Any) -> None:
        self.job = CheckpointedJob(**{"min_nodes": 2} | config)
        self.state = self.job.state
        launch = made_launch(*(command or ("train.py",)))
        self.used: list[int] = []
        self.job.checkpoints.replicas.place_all = lambda: None  # type: ignore[method-assign]
        self.resizing = Resizing(
            self.state, self.job.enrolments, launch, self.job.journal, lambda: mesh or {},
            self.used.append,
        )  # fmt: skip
        for rank in ALL if enrol else ():
            self.job.enrol(rank, needs=ALL)

    def lose(self, *names: str) -> Incident:
        for node in self.state.world.places:
            if node.name in names:
                self.state.lose(node, "no word")
        self.state.failures.clear()
        return self.incident()

    def incident(self) -> Incident:
        now = time.monotonic()
        root = Failure("node_lost", now, now, "n1")
        return Incident("0-1", 1, Diagnosis("node_lost", "node", (), (), "", root), now, now)

    def come(self, index: int, standby_request: int = 0) -> Node:
        node = made_node(index, role=Role.SPARE)
        node.standby_request = standby_request
        self.state.members.join(node)
        self.job.checkpoints.heard(node, StoreReady(1, 0, 8000 + index))
        return node

    def restoring(
        self, *copies: tuple[int, int, int], before: Bound | None = None, trust: Trust = NO_TRUST
    ) -> Restoring:
        """Plan from snapshots (owner, step, world) that any of the nodes holds."""
        made = self.job.restoring
        holders = [
            planner.Holder(
                f"12.0.{i}/0", node.name, node.address, 8000 + i,
                [held(o, s, world=w, epoch=10 - w, needs=tuple(range(w)))
                 for o, s, w in copies if (o + 1) % 4 == i],
            )
            for i, node in enumerate(self.job.nodes)
        ]  # fmt: skip
        made._plan, made._earlier = made._newest(holders, made._seats(), [], set(), before, trust)
        made._shards = made._plan.all_shards()
        return made

    def order(self, node: Node) -> Restore:
        found = self.job.restoring.of(node)
        assert found is not None
        return found


def snapshots(step: int, world: int) -> list[tuple[int, int, int]]:
    return [(owner, step, world) for owner in range(world)]
