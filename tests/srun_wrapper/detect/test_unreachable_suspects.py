"""A node whose report is late: who is asked about it, and what follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from made_job import Job

from srun_wrapper.detect import node_watch, suspects
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.detect.unreachable import TRIED
from srun_wrapper.job.model import Node, Role
from srun_wrapper.protocol.base import Message
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.protocol.peer_messages import Reach, Reached

LIMIT = 0.2


class Cluster:
    """A job of ``size`` nodes; ``silent`` say nothing, and ``answer`` to nobody's attempt.

    ``blind``: nodes that robust-srun alone does not reach. ``dull``: witnesses that do not run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 5, **config: float) -> None:
        self.job = Job(size, 0, unreachable_limit=config.get("limit", LIMIT))
        self.state = self.job.state
        self.silent: set[int] = set()
        self.dead: set[int] = set()
        self.blind: set[int] = set()
        self.dull: set[int] = set()
        self.watched = False
        """True if silence decides as well."""
        self.vouched = False
        """True if other nodes reach the last one, in the end."""
        self.news: list[str] = []
        self.state.on_news = self.news.append
        monkeypatch.setattr(suspects, "HELD_UP", 2.0)
        self.watch = NodeWatch(self.state)
        self.suspects = self.watch.suspects
        for module in (suspects, node_watch):
            monkeypatch.setattr(module, "probe", self.probe)
        self.vouches = bool(config.get("vouches", True))
        for index in range(size):
            node = self.job.node(index)
            node.address, node.second_way = f"10.0.0.{index}", True
            node.hello = Hello(**{**_fields(node.hello), "vouches": self.vouches})
            self.job.lines[index].send = self.obeys(index)  # type: ignore[method-assign]

    async def probe(self, host: str, _port: int, timeout: float, _again: object = ()) -> str:
        index = int(host.rpartition(".")[2])
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if index not in self.dead | self.blind:
                return "accepted"
            await asyncio.sleep(0.01)
        return "unreachable"

    def obeys(self, index: int) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            if isinstance(message, Reach):
                self.tasks.append(asyncio.create_task(self.reach(index, message)))

        return send

    async def reach(self, index: int, order: Reach) -> None:
        target, end = int(order.host.rpartition(".")[2]), time.monotonic() + order.seconds
        while time.monotonic() < end and target in self.dead:
            await asyncio.sleep(0.01)
        answer = "unreachable" if target in self.dead else "accepted"
        if index not in self.silent | self.dull:
            reply = Reached(order.token, answer, TRIED)
            self.job.inbox.message(self.state.nodes[self.node(index).key].connection, reply)  # type: ignore[arg-type]

    def break_way(self, index: int) -> None:
        self.silent.add(index)
        self.blind.add(index)

    def node(self, index: int) -> Node:
        return self.job.node(index)

    def run(self, seconds: float, faults: Callable[[], object], *, until: float = 0.0) -> None:
        """Let it run, then inject faults; what was injected ends ``until`` s later (0: never)."""

        async def reports() -> None:
            while True:
                for index, node in enumerate(self.state.live()):
                    if index not in self.silent | self.dead:
                        node.heard(time.monotonic())
                if self.watched:
                    self.watch.look(time.monotonic())
                await asyncio.sleep(0.02)

        async def drive() -> None:
            self.tasks: list[asyncio.Task[None]] = []
            beside = [
                asyncio.create_task(reports()),
                asyncio.create_task(self.suspects.run(self.news.append)),
            ]
            ready = self.suspects.witnesses
            for node in self.state.live():
                node.heard(time.monotonic())
            others = [n for n in self.state.live() if n.name != self.state.own_node]
            asks = len(others) > 1 and self.vouches and not self.suspects.patience.off
            while asks and not all(map(ready.of, others)):
                await asyncio.sleep(0.01)
            faults()
            if until:
                await asyncio.sleep(until)
                self.silent.clear()
                self.dead.clear()
                self.blind.clear()
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.state.failures:
                await asyncio.sleep(0.01)
            self.vouched = self.suspects.vouched(self.node(-1), end)
            for task in (*beside, *self.tasks):
                task.cancel()

        asyncio.run(asyncio.wait_for(drive(), 20))


def _fields(hello: Hello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def lost(cluster: Cluster) -> list[str]:
    return [n.name for n in cluster.state.nodes.values() if n.role is Role.DEAD]


def test_a_node_that_nobody_reaches_is_lost_soon(cluster: Cluster) -> None:
    began = time.monotonic()
    cluster.run(5.0, lambda: cluster.dead.add(2))
    assert lost(cluster) == ["n2"] and time.monotonic() - began < 3.0
    (failure,) = cluster.state.failures
    (why,) = failure.evidence
    assert "neither robust-srun nor n[1,3-4] can reach 10.0.0.2:7000" in why
    assert cluster.node(2).silence and cluster.node(2).silence.kind == "unreachable"


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("its processes are stopped", lambda c: c.silent.add(2)),
        ("only robust-srun does not reach it", lambda c: c.break_way(4)),
        ("two at once", lambda c: c.dead.update({2, 3})),
        ("the witnesses do not run", lambda c: (c.dead.add(2), c.dull.update({1, 3, 4}))),
        ("robust-srun's own node", lambda c: c.dead.add(0)),
    ],
)
def test_what_is_left_to_silence(
    cluster: Cluster, case: str, fault: Callable[[Cluster], object]
) -> None:
    cluster.run(0.7, lambda: fault(cluster))
    assert not lost(cluster), case
    assert cluster.vouched is bool(cluster.blind)


@pytest.mark.parametrize("limit", [LIMIT, 0.0])
def test_a_broken_way_costs_a_node_only_where_nobody_else_is_asked(
    monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    cluster = Cluster(monkeypatch, limit=limit)
    cluster.watched = True
    cluster.run(2.0, lambda: cluster.break_way(4))
    assert lost(cluster) == ["n4"] * (limit == 0.0)


def test_a_node_that_answers_again_while_others_are_waited_for(cluster: Cluster) -> None:
    """A switch was away: one node's report comes at once, the other's only when TCP tries again."""

    def back() -> None:
        cluster.dead.clear()
        asyncio.get_running_loop().call_later(0.1, cluster.silent.discard, 3)

    def switch() -> None:
        cluster.dead.update({2, 3})
        cluster.silent.update({2, 3})
        asyncio.get_running_loop().call_later(LIMIT + 0.3, back)

    cluster.run(LIMIT + 1.0, switch)
    assert not lost(cluster)


def test_one_witness_is_not_enough_where_there_were_more(cluster: Cluster) -> None:
    def fault() -> None:
        cluster.suspects.witnesses._proven[cluster.node(2).key] = {cluster.node(4).key}
        cluster.dead.add(2)

    cluster.run(0.7, fault)
    assert not lost(cluster)


def test_a_node_that_is_taken_back_makes_patient(cluster: Cluster) -> None:
    cluster.run(5.0, lambda: cluster.dead.add(2))
    node = cluster.node(2)
    assert node.gone
    node.heard(time.monotonic())
    cluster.state.reinstate(node)
    assert not node.gone and cluster.suspects.patience.limit(time.monotonic()) == LIMIT
    cluster.suspects._learn()
    assert cluster.suspects.patience.limit(time.monotonic()) > LIMIT


def test_the_end_of_the_job_and_a_node_that_leaves(cluster: Cluster) -> None:
    def fault(ends: Callable[[], object]) -> None:
        cluster.dead.add(2)
        asyncio.get_running_loop().call_later(0.22, ends)

    cluster.run(0.7, lambda: fault(lambda: setattr(cluster.state, "ending", True)))
    assert not lost(cluster)


def test_of_many_that_do_not_answer_few_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, size=40, limit=3.0)
    seen = [0]

    def count() -> None:
        seen.append(sum(case.unanswered for case in cluster.suspects._cases.values()))
        asyncio.get_running_loop().call_later(0.02, count)

    def fault() -> None:
        cluster.dead.update(range(10, 40))
        count()

    cluster.run(1.5, fault)
    assert max(seen) == suspects.MANY and not lost(cluster)


def test_older_robust_tasks_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, vouches=False)
    cluster.run(0.7, lambda: cluster.dead.add(2))
    assert not lost(cluster) and not cluster.tasks


def test_a_job_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, size=2)
    cluster.run(0.7, lambda: cluster.dead.add(1))
    assert not lost(cluster)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, limit=0.0)
    cluster.suspects.look(time.monotonic())  # would need a running loop to ask anybody
    assert not cluster.suspects._cases


def test_an_outage_that_ends_makes_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, limit=1.0)
    cluster.run(0.3, lambda: cluster.dead.add(2), until=0.7)
    assert not lost(cluster)
    assert cluster.suspects.patience.limit(time.monotonic()) > 1.0


def test_a_hold_up_of_robust_srun_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, limit=0.8)

    def stall() -> None:
        monkeypatch.setattr(suspects, "HELD_UP", 0.1)
        cluster.dead.add(2)
        asyncio.get_running_loop().call_later(0.3, time.sleep, 0.3)

    cluster.run(1.2, stall)
    assert not lost(cluster)
