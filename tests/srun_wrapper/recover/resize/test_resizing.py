"""A job of four nodes goes on with fewer, and with all again: nodes, environment, restores."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from resize_scene import ALL, Scene, snapshots

from robust_slurm.checkpoint.planning.sound import Bound, Trust
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.decide.ladder import OFF
from srun_wrapper.job.model import Role
from srun_wrapper.orders.starting import start_orders
from srun_wrapper.recover.resize.resizing import WARM_BY


def test_the_others_go_on_with_new_numbers_and_their_own_snapshots() -> None:
    scene = Scene()
    incident = scene.lose("n1")
    assert scene.resizing.without(["n1"]) == ""
    assert scene.resizing.shrink(incident)
    state = scene.state
    assert [node.name for node in state.world.places] == ["n0", "n2", "n3"]
    assert state.world.ranks == [(0,), (1,), (2,)] and not state.vacant()
    assert incident.resized == (4, 3) and "resized 4→3" in incident.line()
    scene.restoring(*snapshots(10, 4))
    order = scene.order(state.world.places[1])
    assert (order.step, order.origins, order.anew) == (10, {0: 0, 1: 2, 2: 3}, ())
    assert order.shards.keys() == set(ALL)
    start = start_orders(state, 1.0, "lost", {}, 10, scene.job.restoring.of)[1][1]
    rank = start.env | start.ranks[0].env
    wanted = {
        "RANK": "1", "WORLD_SIZE": "3", "NODE_RANK": "1", "SLURM_NTASKS": "3", "SLURM_NNODES": "3",
        "SLURM_JOB_NODELIST": "n[0,2-3]", "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1",
        "SLURM_NODEID": "1", "ROBUST_RESIZED": "4:3",
    }  # fmt: skip
    assert {name: rank[name] for name in wanted} == wanted


def test_a_second_loss_before_a_step_goes_back_to_the_first_world() -> None:
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.state.new_epoch()
    assert scene.resizing.shrink(scene.lose("n2"))
    scene.restoring(*snapshots(10, 4))
    order = scene.order(scene.state.world.places[1])
    assert order.origins == {0: 0, 1: 3} and order.shards.keys() == set(ALL)
    assert scene.state.world.resized == (4, 2)
    assert scene.resizing.without(["n3"]) == "1 node would be left, min_nodes is 2"


def test_the_newest_step_wins_whichever_world_saved_it() -> None:
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.restoring(*snapshots(10, 4), *snapshots(12, 3))
    order = scene.order(scene.state.world.places[0])
    assert (order.step, order.origins) == (12, {})
    scene.restoring(*snapshots(10, 4), *snapshots(12, 3)[:2])
    assert scene.order(scene.state.world.places[0]).step == 10


def test_a_sound_state_of_an_earlier_world_comes_before_a_doubtful_one_of_this() -> None:
    """The loss is not finite in the first steps of the smaller world: saved in epoch 7."""
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    copies = *snapshots(10, 4), *snapshots(12, 3)
    for more in (
        {"before": Bound(10, 7)},
        {"trust": Trust(memory={(10, 6)}, why="a loss was not finite")},
    ):
        scene.restoring(*copies, **more)
        order = scene.order(scene.state.world.places[0])
        assert (order.step, order.origins) == (10, {0: 0, 1: 2, 2: 3})


def test_a_node_that_comes_takes_the_place_that_lacks_one() -> None:
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.state.new_epoch()
    assert scene.resizing.wanted == [1] and not scene.resizing.ready
    assert not scene.resizing.fill(scene.incident())
    node = scene.come(7, standby_request=5)
    assert scene.resizing.ready
    incident = scene.incident()
    assert scene.resizing.fill(incident)
    world = scene.state.world
    assert [n.name for n in world.places] == ["n0", "n7", "n2", "n3"]
    assert (world.ranks, world.resized) == ([(0,), (1,), (2,), (3,)], None)
    assert (incident.resized, scene.used, node.role) == ((3, 4), [5], Role.ACTIVE)
    scene.restoring(*snapshots(20, 3))
    order = scene.order(node)
    assert (order.origins, order.anew) == ({0: 0, 1: 1, 2: 1, 3: 2}, (1,))
    assert order.shards.keys() == {0, 1, 2}
    assert not scene.resizing.wanted and not scene.resizing.ready


@pytest.mark.parametrize(
    ("warm", "said", "after", "grows"),
    [
        (True, {}, 0.0, False),  # it imports
        (True, {}, WARM_BY - 1, False),
        (True, {}, WARM_BY, True),
        (True, {0: 1}, 0.0, True),
        (True, {0: 0}, 0.0, True),  # it cannot be warm
        (False, {}, 0.0, True),
    ],
)
def test_ranks_that_run_are_not_stopped_for_a_node_that_still_imports(
    warm: bool, said: dict[int, int], after: float, grows: bool
) -> None:
    scene = Scene(warm=warm)
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.state.new_epoch()
    scene.state.learnt = True
    node, now = scene.come(7), time.monotonic()
    assert scene.resizing.prepared(now) is not warm
    node.warm = said
    assert scene.resizing.prepared(now + after) is grows
    assert scene.resizing.ready, "a recovery takes it in any case"
    assert scene.resizing.fill(scene.incident()) and node in scene.state.world.places


def test_a_growth_takes_prepared_nodes_only_and_a_recovery_those_first() -> None:
    for symptom, places in ("grow", ["n0", "n8", "n3"]), ("node_lost", ["n0", "n8", "n7", "n3"]):
        scene = Scene()
        assert scene.resizing.shrink(scene.lose("n1", "n2"))
        scene.state.new_epoch()
        scene.state.learnt = True
        scene.come(7)
        scene.come(8).warm = {0: 1}
        assert scene.resizing.prepared(time.monotonic())
        incident = scene.incident()
        incident.diagnosis = replace(incident.diagnosis, symptom=symptom)
        assert scene.resizing.fill(incident)
        assert [n.name for n in scene.state.world.places] == places


def test_a_world_whose_prepared_node_has_gone_meanwhile_does_not_change() -> None:
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1", "n2"))
    scene.state.new_epoch()
    scene.state.learnt = True
    scene.come(7)  # imports still
    before, incident = list(scene.state.world.places), scene.incident()
    incident.diagnosis = replace(incident.diagnosis, symptom="grow")
    assert not scene.resizing.fill(incident)
    assert scene.state.world.places == before


def test_ranks_that_make_no_step_in_the_new_world_are_known() -> None:
    scene = Scene()
    assert not scene.resizing.failed
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.state.new_epoch()
    assert scene.resizing.failed
    scene.state.progress.beats = 1
    scene.resizing.note_steps()
    scene.state.new_epoch()  # with other code, or for a check
    assert not scene.resizing.failed


def test_without_a_checkpointer_the_mesh_of_the_first_world_stays_true() -> None:
    scene = Scene(enrol=False, mesh={"dp": 4})
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.state.new_epoch()
    assert scene.resizing.without(["n3"]) == ""


def test_the_step_time_of_another_world_is_no_usual_one() -> None:
    scene = Scene()
    scene.state.pace.tempo.accept(0.5)
    assert scene.resizing.shrink(scene.lose("n1"))
    assert scene.state.pace.tempo.usual() is None and scene.state.world.uneven


@pytest.mark.parametrize(
    ("scene", "why"),
    [
        ({"min_nodes": 0}, OFF),
        ({"min_nodes": 4}, "3 nodes would be left, min_nodes is 4"),
        ({"mesh": {"tp": 2, "dp": 2}}, "more than data parallelism and pipelines"),
        ({"mesh": {"pp": 2, "dp": 2}}, "a Checkpointer that gets the mesh"),
        ({"enrol": False, "mesh": {"pp": 2, "dp": 2}}, "a Checkpointer that gets the mesh"),
        ({"mesh": {"dp_shard": 4}}, "more than data parallelism"),
        ({"enrol": False}, "nothing says that all ranks hold the same"),
        ({"enrol": False, "mesh": {"dp": 4}}, ""),
        ({"enrol": False, "mesh": {"dp": 8}}, "the mesh has 8 ranks, 4 are known"),
        ({"mesh": {"dp": 4}}, ""),
    ],
)
def test_what_must_be_known_before_a_job_goes_on_with_fewer(scene: Any, why: str) -> None:
    found = Scene(**scene).resizing.without(["n1"])
    assert why in found and bool(why) == bool(found)


def test_a_torchrun_that_numbers_its_nodes_itself_is_refused() -> None:
    scene = Scene("torchrun", "--rdzv-backend=c10d", "train.py")
    assert "--rdzv-backend=static" in scene.resizing.without(["n1"])


def test_ranks_with_input_of_their_own_keep_their_numbers() -> None:
    scene = Scene()
    scene.resizing._launch = replace(scene.resizing._launch, feed=StdinFeed.OWN)
    assert "input of their own" in scene.resizing.without(["n1"])


def cut(scene: Scene, replicas: bool, **said: Any) -> None:
    """Have the ranks enrol with parameters in blocks. ``replicas``: of two ranks each."""
    for rank in ALL:
        scene.job.enrol(rank, needs=(rank % 2, rank % 2 + 2) if replicas else (rank,))
        each = scene.job.enrolments.ranks[rank]
        each.said = structs.replace(each.said, **said)


def test_any_rank_of_fsdp_leaves_and_its_blocks_go_to_the_others() -> None:
    scene = Scene(enrol=False, mesh={"dp_shard": 4})
    cut(scene, replicas=False, lengths=(1, 16))
    assert scene.resizing.unfit() == ""
    assert scene.resizing.shrink(scene.lose("n1"))
    assert scene.job.enrolments.earlier[0].owners == {0: (0, 3, 1), 1: (2, 1), 2: (3, 2)}
    scene.come(7)
    assert scene.resizing.fill(scene.incident())
    found = scene.job.enrolments.earlier
    assert [each.size for each in found] == [3, 4]
    assert found[0].owners[1] == (1, 0) and found[0].anew == {1}  # rows 4-7 of 6 + 6 + 4
    assert all(rank in owners for rank, owners in found[1].owners.items())
    scene.job.enrolments.ranks[2].said = structs.replace(
        scene.job.enrolments.ranks[2].said, lengths=(1, 8)
    )
    assert "cut in different ways" in scene.resizing.without(["n3"])


def test_a_whole_replica_of_hsdp_leaves_and_comes_back_with_its_spare_node() -> None:
    scene = Scene(enrol=False, mesh={"dp_replicate": 2, "dp_shard": 2})
    cut(scene, replicas=True, shards=2)
    assert scene.resizing.shrink(scene.lose("n1"))
    assert [node.name for node in scene.state.world.places] == ["n2", "n3"]
    assert scene.job.enrolments.earlier[0].owners == {0: (2, 0), 1: (3, 1)}
    assert "only one replica" in scene.resizing.without(["n3"])
    assert not scene.resizing.ready
    scene.come(7)
    assert scene.resizing.fill(scene.incident())
    assert len(scene.state.world.places) == 4
    cut(scene := Scene(enrol=False), replicas=False, shards=2)
    assert "not known to hold the same" in scene.resizing.without(["n1"])


def test_a_state_that_is_not_shared_or_is_fixed_is_refused() -> None:
    scene = Scene(enrol=False)
    for rank in ALL:
        scene.job.enrol(rank)
    assert "do not all hold the same" in scene.resizing.without(["n1"])
    scene = Scene()
    each = scene.job.enrolments.ranks[2]
    each.said = structs.replace(each.said, fixed="its parameters are distributed tensors (FSDP)")
    assert "distributed tensors" in scene.resizing.without(["n1"])


def test_ranks_that_are_not_where_they_were_are_no_slip() -> None:
    """A script whose Checkpointers have a world of their own: on three of the four nodes."""
    scene = Scene(enrol=False)
    for rank in ALL[:3]:
        scene.job.enrol(rank, needs=ALL[:3])
        each = scene.job.enrolments.ranks[rank]
        each.said = structs.replace(each.said, world=3)
    assert "some nodes have no rank" in scene.resizing.without(["n3"])
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.come(7, standby_request=5)
    assert scene.resizing.ready
    for rank, place in ((1, 0), (2, 1)):
        scene.job.enrolments.ranks[rank].place = place
    assert not scene.resizing.ready and not scene.resizing.fill(scene.incident())


def test_ranks_of_a_torchrun_are_renumbered_with_its_nodes() -> None:
    """One slot a node, two ranks each."""
    scene = Scene("torchrun", "train.py", enrol=False)
    for rank in range(4):
        scene.job.enrol(rank, needs=tuple(range(8)))
    known = scene.job.enrolments
    for rank in range(8):
        base = known.ranks[rank % 4]
        said = structs.replace(base.said, rank=rank, world=8, needs=tuple(range(8)))
        known.ranks[rank] = replace(known.ranks[rank // 2] if rank < 2 else base, said=said)
    for rank in range(8):
        place = rank // 2
        node = scene.job.nodes[place]
        at = replace(known.ranks[rank].at, node=node)
        known.ranks[rank] = replace(known.ranks[rank], place=place, at=at)
    assert scene.resizing.shrink(scene.lose("n1"))
    assert scene.state.world.ranks == [(0,), (1,), (2,)]
    assert scene.state.world.resized == (8, 6)
    assert {r: e.place for r, e in known.ranks.items()} == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert known.earlier[0].owners[2] == (4, 2)  # and of share 2, which is its own now: rank 2
