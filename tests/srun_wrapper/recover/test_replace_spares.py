"""Spares of the allocation come before standby nodes, also those that were in doubt."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_job import KeptJournal, made_launch

from robust_slurm.config import Config
from srun_wrapper.command.input_rules import Feed
from srun_wrapper.command.steps import Secrets
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import REQUEUED, Plan
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.protocol.server import Connection
from srun_wrapper.recover import flaps, last_rung, recovery, settling
from srun_wrapper.recover.nodes import node_parts
from srun_wrapper.recover.settling import Settling
from srun_wrapper.recover.standby.request import Requester
from srun_wrapper.requeue.requeue import Returned

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

    def __init__(self, tmp_path: Any, slots: int = 1, feed: Feed = Feed.FILE) -> None:
        self.state = JobState(Config(), 7, "n1")
        self.nodes = [self.node(i, role) for i, role in enumerate("aas")]
        self.spare = self.nodes[2]
        self.spare.connection, self.spare.closed_at = None, time.monotonic()
        self.state.members.lay_out(self.nodes[:2], [tuple(range(slots)), (slots,)])
        self.state.world.epoch = 1
        self.state.lose(self.nodes[1], "no word")
        self.state.failures.clear()
        self.silent = {"n3"}
        self.ledger: Any = SimpleNamespace(dir=tmp_path, report_node=lambda *_report: None)
        self.slurm: Any = SimpleNamespace()
        self.journal = KeptJournal()
        launch = dataclasses.replace(made_launch(), feed=feed)
        watch = NodeWatch(self.state)
        watch.suspected = lambda node, _now: node.name in self.silent  # type: ignore[method-assign]
        topology = Topology(self.state.members, self.state.config, launch, self.journal, dict, dict)
        requester = Requester(launch, Secrets(b"", 1), self.slurm, topology.prefer)
        self.parts = node_parts(
            self.state, requester, self.ledger, self.journal, topology, watch, lambda: False
        )
        self.settling = Settling(self.state, watch, lambda: None, lambda: False)
        self.replacement = self.parts.replacement
        self.standby = self.node(8, "s")
        self.standby.standby_request = 1
        self.incident = cast(
            Incident, SimpleNamespace(plan=Plan("swap_standby", ("n2",), ""), swaps=[])
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


def test_a_spare_that_answers_again_is_used_while_a_standby_node_is_awaited(tmp_path: Any) -> None:
    async def life() -> None:
        scene = Scene(tmp_path)
        partition = scene.replacement._standby = cast(Any, StandbyPartition(scene.standby, 1000))
        asyncio.get_running_loop().call_later(0.05, scene.back)
        assert await scene.replacement.fill(scene.incident)
        assert scene.incident.swaps == [("n2", "n3")]
        assert partition.asked == 1 and scene.standby.role is Role.SPARE

    asyncio.run(asyncio.wait_for(life(), 10))


def test_a_standby_node_is_used_when_the_spare_does_not_answer(tmp_path: Any) -> None:
    async def life() -> None:
        scene = Scene(tmp_path)
        scene.replacement._standby = cast(Any, StandbyPartition(scene.standby, 3))
        assert await scene.replacement.fill(scene.incident)
        assert scene.incident.swaps == [("n2", "n9")]

    asyncio.run(asyncio.wait_for(life(), 10))


@pytest.mark.parametrize("back", [False, True])
def test_a_plan_to_shrink_uses_a_spare_and_asks_for_no_other_node(
    tmp_path: Any, back: bool
) -> None:
    async def life() -> None:
        scene = Scene(tmp_path)
        if back:
            scene.back()
        partition = scene.replacement._standby = cast(Any, StandbyPartition(scene.standby, 0))
        scene.incident.plan = Plan("shrink", ("n2",), "")
        gave_up: list[Any] = []
        resizing: Any = SimpleNamespace(
            shrink=lambda incident: gave_up.append(incident) or True, fill=lambda _incident: False
        )
        scene.replacement._resizing = resizing
        assert await scene.replacement.fill(scene.incident)
        assert (len(gave_up), partition.asked) == (0 if back else 1, 0)
        assert scene.incident.swaps == ([("n2", "n3")] if back else [])

    asyncio.run(asyncio.wait_for(life(), 10))


def test_a_node_with_which_the_world_grows_has_just_joined(tmp_path: Any) -> None:
    """A node that cannot start its rank is proven unfit, and leaves alone: as after a swap."""

    async def life() -> None:
        scene = Scene(tmp_path)
        world, members = scene.state.world, scene.state.members
        world.places[:], world.ranks[:] = scene.nodes[:1], [(0,)]
        scene.incident.plan = Plan("restart", (), "")
        resizing: Any = SimpleNamespace(
            fill=lambda _incident: members.lay_out([scene.nodes[0], scene.standby], [(0,), (1,)])
        )
        scene.replacement._resizing = resizing
        assert await scene.replacement.fill(scene.incident)
        assert scene.replacement.just_joined() == {"n9"} and not scene.incident.swaps

    asyncio.run(asyncio.wait_for(life(), 10))


def test_a_node_that_comes_as_its_place_is_given_up_is_a_swap(tmp_path: Any) -> None:
    """Not a lost node that answers again: that is what neither a swap nor a resize would mean."""

    async def life() -> None:
        scene = Scene(tmp_path)
        scene.incident.plan = Plan("shrink", ("n2",), "")
        members, places = scene.state.members, scene.state.world.places
        resizing: Any = SimpleNamespace(
            shrink=lambda _incident: not places.remove(scene.nodes[1]),
            fill=lambda _incident: members.arrange([scene.nodes[0], scene.standby]),
        )
        scene.replacement._resizing = resizing
        assert await scene.replacement.fill(scene.incident)
        assert scene.incident.swaps == [("n2", "n9")]

    asyncio.run(asyncio.wait_for(life(), 10))


@pytest.mark.parametrize("place", [0, 1])
def test_where_one_node_comes_for_two_the_most_necessary_place_gets_it(
    tmp_path: Any, place: int
) -> None:
    """A suspect goes on without it, a lost node cannot; ``place``: for which Slurm gave it."""

    async def life() -> None:
        scene = Scene(tmp_path)
        scene.incident.plan = Plan("swap_standby", ("n2", "n1"), "")
        scene.state.members.move(scene.nodes[0], Role.EVICTED)
        scene.replacement._standby = cast(Any, StandbyPartition(scene.standby, 0, place))
        assert not await scene.replacement.fill(scene.incident)
        assert scene.incident.swaps == [("n2", "n9")]

    asyncio.run(asyncio.wait_for(life(), 10))


@pytest.mark.parametrize(("comes", "wanted", "spares"), [(True, 1, 1), (False, 1, 0), (True, 0, 0)])
def test_the_ladder_counts_spares_once_it_is_known_which_answer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, comes: bool, wanted: int, spares: int
) -> None:
    # A job without spares waits for none; if it did, it would run into its time limit.
    monkeypatch.setattr(settling, "IN_DOUBT", 0.5 if wanted and not comes else 60.0)

    async def life() -> None:
        scene = Scene(tmp_path)
        if comes:
            asyncio.get_running_loop().call_later(0.1, scene.back)
        await scene.settling.settle_spares(wanted)
        assert scene.parts.means.now().spares == spares

    asyncio.run(asyncio.wait_for(life(), 10))


def test_a_requeue_does_not_wait_for_a_state_directory_that_does_not_answer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(last_rung, "CLAIM", 0.05)
    monkeypatch.setattr(last_rung, "claim", lambda _directory, _restarts: never.wait())
    claimed = Scene(tmp_path).parts.last_rung._claim(0)
    assert asyncio.run(asyncio.wait_for(claimed, 10))
    assert f"{tmp_path} does not answer in 0.05 s: requeueing" in capfd.readouterr().err
    never.set()


@pytest.mark.parametrize(
    ("ranks", "feed", "order"),
    [
        ([(0, 1), (2, 3), (4, 5)], Feed.FILE, "132"),
        ([(0, 1), (2, 3), (4, 5)], Feed.EVERY, "132"),
        ([(0, 1), (2, 3), (4,)], Feed.FILE, "213"),  # n3 has other numbers of ranks
        ([(0,), (2, 3), (4,)], Feed.FILE, "123"),
        ([(0, 1), (2, 3), (4, 5)], Feed.OWN, "123"),  # each task's input is its own
    ],
)
def test_a_node_in_doubt_exchanges_its_ranks(
    tmp_path: Any, ranks: list[tuple[int, ...]], feed: Feed, order: str
) -> None:
    """From the next epoch on; nobody leaves, and spares stay spares."""
    scene = Scene(tmp_path, feed=feed)
    nodes = [scene.node(index, "a") for index in range(10, 13)]
    scene.state.members.lay_out(nodes, ranks)
    other = scene.replacement.exchange(nodes[1].name)
    places = scene.state.world.places
    assert "".join(str(nodes.index(node) + 1) for node in places) == order
    assert other == ("" if order == "123" else places[1].name)
    assert all(node.role is Role.ACTIVE for node in nodes)
    assert scene.replacement.exchange("n99") == ""


@pytest.mark.parametrize("proven", [True, False])
def test_a_node_whose_own_mount_is_silent_is_excluded_and_its_mount_reported(
    tmp_path: Any, proven: bool
) -> None:
    """A node that waits alone at this moment is no proof: its server may be away."""
    scene, reports = Scene(tmp_path), []
    scene.ledger.report_node = lambda name, _incident, record: reports.append(
        (name, record["symptom"], *record["evidence"], record["rule"])
    )
    node, cause = scene.node(3, "a"), Failure("hang", 1.0, 0.0, "n4")
    node.stalled, node.own_mount = ("/data",), "/data" if proven else ""
    incident = Incident("0-1", 1, diagnose([cause]), 0.0, 1.0)
    scene.parts.release.evict(("n4",), incident)
    assert node.role is Role.EVICTED  # either way
    assert [bad.node for bad in scene.parts.reports.evidence()] == (["n4"] if proven else [])
    line = "file system /data does not answer on n4 alone"
    assert reports == ([("n4", "mount_silent", line, "own-mount")] if proven else [])


def test_only_nodes_that_were_reported_are_drained(tmp_path: Any) -> None:
    """With drain = "direct": not those that left for another's fault, nor one that came back."""
    scene, drained = Scene(tmp_path), []
    scene.slurm.drain = lambda name, _reason: drained.append(name)
    crashed, silent, back, stalled, ours, shared = (scene.node(i, "a") for i in range(3, 9))
    silent.silent_as = back.silent_as = Role.ACTIVE
    stalled.stalled, ours.ours = ("/data",), True
    names = tuple(n.name for n in (crashed, silent, back, stalled, ours, shared))
    diagnosis = diagnose([Failure("crash", 1.0, 0.0, crashed.name)])
    incident = Incident(
        "0-1", 1, dataclasses.replace(diagnosis, unreported=frozenset({shared.name})), 0.0, 1.0
    )
    incident.plan = Plan("swap_spare", names, "")

    async def leave() -> None:
        scene.parts.release.evict(names, incident)
        scene.state.on_back(back)
        scene.parts.reports.report_silent()
        await scene.parts.reports.flaps.close(lambda: True)
        scene.parts.release._drain(incident)

    asyncio.run(leave())
    assert drained == [crashed.name, silent.name]


def test_a_drain_waits_until_it_is_known_whether_the_report_stands(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, drained = Scene(tmp_path), []
    node = scene.node(3, "a")

    async def answers(*_: Any) -> str:
        await asyncio.sleep(0.05)
        return "refused"

    async def insist(what: str, order: Callable[[], Any]) -> None:
        if "drain" in what:
            order()

    async def leave() -> None:
        scene.state.lose_silent(node, "no word", shared=False)
        incident = Incident("0-1", 1, diagnose(scene.state.failures), 0.0, 1.0)
        incident.plan = Plan("swap_spare", (node.name,), "")
        scene.parts.release.evict((node.name,), incident)
        scene.parts.reports.report_silent()
        assert scene.parts.reports.reported(node.name)
        await scene.parts.release._release([node.name], incident)

    monkeypatch.setattr(flaps, "probe", answers)
    scene.ledger.withdraw = lambda *_: None
    scene.slurm.drain = lambda name, _reason: drained.append(name)
    scene.parts.release._config = dataclasses.replace(scene.state.config, drain="direct")
    scene.parts.release._wait = cast(Any, SimpleNamespace(insist=insist))
    asyncio.run(leave())
    assert not drained and not scene.parts.reports.reported(node.name)


def test_a_suspect_that_stays_is_reported_when_it_is_bad_later(tmp_path: Any) -> None:
    """Nothing could replace it when it was one of several suspects of a hang."""
    scene, reports = Scene(tmp_path), []
    scene.ledger.report_node = lambda name, *_: reports.append(name)
    node = scene.nodes[0]
    several = diagnose([Failure("hang", 1.0, 0.0, "n1", suspects=("n1", "n2"))], 2)
    scene.parts.release.evict(("n1",), Incident("0-1", 1, several, 0.0, 1.0))
    scene.parts.release.reinstate(("n1",))
    assert node.role is Role.ACTIVE and not reports
    crash = diagnose([Failure("crash", 1.0, 0.0, "n1")])
    scene.parts.release.evict(("n1",), Incident("0-2", 2, crash, 1.0, 2.0))
    assert reports == ["n1"]
    assert [bad.node for bad in scene.parts.reports.evidence()] == ["n1"]


def test_the_last_message_names_the_nodes_that_the_requeued_job_excludes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """n2 is bad, n4 waits for a server that may be away, n5 is not excluded for want of others."""
    scene, asked = Scene(tmp_path), list[Any]()
    for index in (3, 4):
        scene.node(index, "a").stalled = ("/data",) if index == 3 else ()
    names = ("n2", "n4", "n5")
    incident = Incident("0-1", 1, diagnose([Failure("crash", 1.0, 0.0, "n2")]), 0.0, 1.0)
    incident.plan = Plan("requeue", names, "")

    def put_back(_slurm: Any, job: int, bad: Any, *others: Any) -> Any:
        asked[:] = [sorted(one.node for one in bad), others[3]]
        return Returned(job, ("n2", "n9"))

    async def call(_what: str, order: Callable[[], Any], whole: bool) -> Any:
        return order()

    async def nothing(*_any: Any) -> None: ...

    stopping: Any = SimpleNamespace(end_world=nothing)
    restoration: Any = SimpleNamespace(flush=nothing)
    scene.parts.last_rung._wait = cast(Any, SimpleNamespace(call=call))
    monkeypatch.setattr(last_rung, "put_back", put_back)
    monkeypatch.setattr(last_rung, "claim", lambda *_any: True)
    one = recovery.Recovery(
        scene.state,
        cast(Any, None),
        cast(Any, None),
        scene.parts,
        stopping,
        recovery.Restoration(restoration, restoration, restoration),
        cast(Any, None),
        code=cast(Any, None),
        phase=(phase := Phase()),
        journal=scene.journal,
        record=lambda _incident: None,
        start_epoch=lambda _reason: None,
    )
    end = asyncio.run(one._requeue(incident, incident.plan))
    assert end.code == REQUEUED and phase.name == "requeued"
    assert asked == [["n2", "n5"], ("n4",)]  # n4 is released, but not excluded
    said = "no node can replace n2,n4,n5: the job is requeued without n2\n"
    assert said in capfd.readouterr().err
