"""A job that has lost a node, its spare, and what stands for the standby partition."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from made_job import KeptJournal, made_launch

from robust_slurm.config import Config
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.command.steps import Secrets
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import LadderPlan
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.protocol.server import Connection
from srun_wrapper.recover.nodes import node_parts
from srun_wrapper.recover.settling import Settling
from srun_wrapper.recover.standby.request import Requester

LINE = cast(Connection, SimpleNamespace(send=lambda _message: None))


class StandbyPartition:
    """Stands for the standby partition, where a node comes after ``patience`` looks."""

    def __init__(self, node: Node, patience: int, place: int = 0) -> None:
        self.node, self.patience, self.asked, self.place = node, patience, 0, place

    async def take(
        self,
        places: Mapping[int, Any],
        vacant: Callable[[int], bool],
        enough: Callable[[], bool],
        fewer: bool,
    ) -> dict[int, Node]:
        self.asked += 1
        for _ in range(self.patience):
            if enough():
                return {}
            await asyncio.sleep(0.005)
        return {list(places)[self.place]: self.node}

    def to_report(self, _came: bool) -> dict[str, Any]:
        return {}


class Scene:
    """A job on n1 and n2, n3 spare, n2 lost; n3's connection is broken."""

    def __init__(self, tmp_path: Any, slots: int = 1, feed: StdinFeed = StdinFeed.FILE) -> None:
        self.state = JobState(Config(), 7, "n1")
        self.nodes = [self.node(i, role) for i, role in enumerate("aas")]
        self.spare = self.nodes[2]
        self.spare.connection, self.spare.closed_at = None, time.monotonic()
        self.state.members.lay_out(self.nodes[:2], [tuple(range(slots)), (slots,)])
        self.state.world.epoch = 1
        self.state.lose(self.nodes[1], "no word")
        self.state.failures.clear()
        self.silent = {"n3"}
        self.ledger: Any = SimpleNamespace(
            dir=tmp_path, report_node=lambda *_report: None, requeue=lambda _plan: None
        )
        self.slurm: Any = SimpleNamespace()
        self.journal = KeptJournal()
        launch = dataclasses.replace(made_launch(), feed=feed)
        watch = NodeWatch(self.state)
        watch.suspected = lambda node, _now: node.name in self.silent  # type: ignore[method-assign]
        topology = Topology(self.state.members, self.state.config, launch, self.journal, dict, dict)
        requester = Requester(launch, Secrets(b"", 1), self.slurm, topology.prefer)
        self.parts = node_parts(
            self.state,
            requester,
            self.ledger,
            self.journal,
            topology,
            watch,
            lambda: False,
            dict,
            Enrolments(),
        )
        self.settling = Settling(self.state, watch, lambda: None, lambda: False)
        self.replacement = self.parts.replacement
        self.standby = self.node(8, "s")
        self.standby.standby_request = 1
        self.incident = cast(
            Incident, SimpleNamespace(plan=LadderPlan("swap_standby", ("n2",), ""), swaps=[])
        )

    def node(self, index: int, role: str) -> Node:
        name = f"n{index + 1}"
        hello = Hello(7, "0", index, name, (index,), 3, 3, 7000, 7001, 0, 0)
        kind = Role.ACTIVE if role == "a" else Role.SPARE
        node = Node((7, "0", index), name, "a", hello, LINE, kind, time.monotonic(), 7001)
        self.state.members.join(node)
        return node

    def back(self) -> None:
        self.spare.connection = LINE
        self.silent.clear()
