"""Spares of the allocation come before standby nodes, also those that were in doubt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replacing import Scene, StandbyPartition

from robust_slurm.slurm import SlurmError
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.decide.budget import Budget
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import GAVE_UP, NOTHING_LEFT, REQUEUED, LadderPlan
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.recover import last_rung, recovery, settling
from srun_wrapper.requeue.requeue import Returned


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
        scene.incident.plan = LadderPlan("shrink", ("n2",), "")
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
        scene.incident.plan = LadderPlan("restart", (), "")
        resizing: Any = SimpleNamespace(
            fill=lambda _incident: members.lay_out([scene.nodes[0], scene.standby], [(0,), (1,)])
        )
        scene.replacement._resizing = resizing
        assert await scene.replacement.fill(scene.incident)
        assert scene.replacement.just_joined() == {"n9"} and not scene.incident.swaps

    asyncio.run(asyncio.wait_for(life(), 10))


def test_a_node_that_comes_as_its_place_is_given_up_is_a_swap(tmp_path: Any) -> None:
    """The node is no lost one that answers again, which would mean neither a swap nor a resize."""

    async def life() -> None:
        scene = Scene(tmp_path)
        scene.incident.plan = LadderPlan("shrink", ("n2",), "")
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
        scene.incident.plan = LadderPlan("swap_standby", ("n2", "n1"), "")
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


def test_a_requeue_that_slurm_refuses_can_be_tried_again_and_by_others(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's claim stayed: later ones were told that other nodes bring the job back."""
    scene, asked = Scene(tmp_path), list[str]()

    def put_back(*_: Any) -> Any:
        asked.append("asked")
        raise SlurmError("conflict", (), "refused")

    async def call(_what: str, order: Callable[[], Any], whole: bool) -> Any:
        return order()

    monkeypatch.setattr(last_rung, "put_back", put_back)
    scene.parts.last_rung._wait = cast(Any, SimpleNamespace(call=call))
    for _ in range(2):
        assert "cannot requeue" in asyncio.run(scene.parts.last_rung.requeue())
    assert len(asked) == 2 and last_rung.claim(tmp_path, 0)


def test_a_requeue_does_not_wait_for_a_state_directory_that_does_not_answer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(last_rung, "CLAIM", 0.05)
    monkeypatch.setattr(last_rung, "claim", lambda _directory, _restarts: never.wait())
    claimed = Scene(tmp_path).parts.last_rung._claim()
    assert asyncio.run(asyncio.wait_for(claimed, 10))
    assert f"{tmp_path} does not answer in 0.05 s: requeueing" in capfd.readouterr().err
    never.set()


@pytest.mark.parametrize(
    ("ranks", "feed", "order"),
    [
        ([(0, 1), (2, 3), (4, 5)], StdinFeed.FILE, "132"),
        ([(0, 1), (2, 3), (4, 5)], StdinFeed.EVERY, "132"),
        ([(0, 1), (2, 3), (4,)], StdinFeed.FILE, "213"),  # n3 has other numbers of ranks
        ([(0,), (2, 3), (4,)], StdinFeed.FILE, "123"),
        ([(0, 1), (2, 3), (4, 5)], StdinFeed.OWN, "123"),  # each task's input is its own
    ],
)
def test_a_node_in_doubt_exchanges_its_ranks(
    tmp_path: Any, ranks: list[tuple[int, ...]], feed: StdinFeed, order: str
) -> None:
    """The ranks change nodes from the next epoch on; no node leaves, and spares stay spares."""
    scene = Scene(tmp_path, feed=feed)
    nodes = [scene.node(index, "a") for index in range(10, 13)]
    scene.state.members.lay_out(nodes, ranks)
    other = scene.replacement.exchange(nodes[1].name)
    places = scene.state.world.places
    assert "".join(str(nodes.index(node) + 1) for node in places) == order
    assert other == ("" if order == "123" else places[1].name)
    assert all(node.role is Role.ACTIVE for node in nodes)
    assert scene.replacement.exchange("n99") == ""


def made_recovery(scene: Scene, localization: Any = None) -> recovery.Recovery:
    """A recovery of the scene's job whose ranks end at once and which restores nothing."""

    async def ended(*_any: Any) -> bool:
        return True

    restoration: Any = SimpleNamespace(flush=ended)
    return recovery.Recovery(
        scene.state,
        scene.settling,
        localization,
        scene.parts,
        cast(Any, SimpleNamespace(end_world=ended)),
        recovery.Restoration(restoration, restoration, restoration),
        cast(Any, None),
        code=cast(Any, SimpleNamespace(other=lambda: False, waits=lambda: False)),
        kill_on_bad=ended,
        phase=Phase(),
        journal=scene.journal,
        record=lambda _incident: None,
        start_epoch=lambda _reason: None,
    )


def test_a_spare_with_too_few_slots_does_not_keep_the_recovery_busy_for_ever(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The spare was counted again each time that it did not fit. The job ends with our own code."""
    scene = Scene(tmp_path)
    scene.state.members.lay_out(scene.nodes[:2], [(0,), (1, 2)])
    scene.back()
    asked: list[int] = []

    async def take(places: Mapping[int, Any], **_rest: Any) -> dict[int, Node]:
        asked.extend(places)
        await asyncio.sleep(0)
        return {}

    nobody: Any = SimpleNamespace(take=take, to_report=lambda _came: {})
    scene.replacement._standby = nobody
    lost = diagnose([Failure("node_lost", 1.0, 0.0, "n2")], 2)
    incident = Incident("0-1", 1, lost, 0.0, 1.0)
    one = made_recovery(scene, SimpleNamespace(budget=Budget()))
    end = asyncio.run(asyncio.wait_for(one._decide_and_replace(incident), 20))
    assert isinstance(end, recovery.RecoveryEnd) and end.code in (GAVE_UP, NOTHING_LEFT)
    assert asked == [1] and "stopped: " in capfd.readouterr().err


def test_the_last_message_names_the_nodes_that_the_requeued_job_excludes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """n2 is bad, n4 waits for a server that may be away, n5 is not excluded for want of others."""
    scene, asked = Scene(tmp_path), list[Any]()
    for index in (3, 4):
        scene.node(index, "a").stalled = ("/data",) if index == 3 else ()
    names = ("n2", "n4", "n5")
    incident = Incident("0-1", 1, diagnose([Failure("crash", 1.0, 0.0, "n2")]), 0.0, 1.0)
    incident.plan = LadderPlan("requeue", names, "")

    def put_back(_slurm: Any, job: int, bad: Any, *others: Any) -> Any:
        asked[:] = [sorted(one.node for one in bad), others[3]]
        return Returned(job, ("n2", "n9"))

    async def call(_what: str, order: Callable[[], Any], whole: bool) -> Any:
        return order()

    scene.parts.last_rung._wait = cast(Any, SimpleNamespace(call=call))
    monkeypatch.setattr(last_rung, "put_back", put_back)
    monkeypatch.setattr(last_rung, "claim", lambda *_any: True)
    one = made_recovery(scene)
    end = asyncio.run(one._requeue(incident, incident.plan))
    assert end.code == REQUEUED and one._phase.name == "requeued"
    assert asked == [["n2", "n5"], ("n4",)]  # n4 is released, but not excluded
    said = "no node can replace n2,n4,n5: the job is requeued without n2\n"
    assert said in capfd.readouterr().err
