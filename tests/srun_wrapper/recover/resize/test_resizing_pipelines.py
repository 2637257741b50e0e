"""A job of two pipelines on four nodes goes on with one, and with both again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from resize_scene import ALL, Scene, snapshots

from srun_wrapper.orders.starting import start_orders

PIPELINES = {"pp": 2, "dp": 2}  # ranks 0 and 1 are the first stage


def pipelines(scene: Scene, alike: bool = True, mesh: dict[str, int] = PIPELINES) -> Scene:
    for rank in ALL:
        needs = (rank // 2 * 2, rank // 2 * 2 + 1) if alike else (rank,)
        scene.job.enrol(rank, mesh=mesh, needs=needs, stages=2)
    return scene


def test_a_whole_pipeline_leaves_and_each_rank_goes_on_with_its_own_stage() -> None:
    """n1 is lost: its pipeline's other node, n3, is a spare, and comes back with another one."""
    scene = pipelines(Scene(enrol=False, mesh=PIPELINES))
    assert scene.resizing.unfit() == ""
    assert scene.resizing.shrink(scene.lose("n1"))
    state, known = scene.state, scene.job.enrolments
    assert [node.name for node in state.world.places] == ["n0", "n2"]
    assert known.earlier[0].owners == {0: (0, 1), 1: (2, 3)}  # and of share 1: 1 and 3
    assert known.stages() == ((0,), (1,)) and "only one replica" in scene.resizing.without(["n2"])
    scene.restoring(*snapshots(10, 4))
    start = start_orders(state, 1.0, "lost", {}, 10, scene.job.restoring.of)[1][1]
    assert (start.env["ROBUST_RESIZED"], start.env["ROBUST_REPLICA_RANKS"]) == ("4:2", "2")
    assert not scene.resizing.ready
    scene.come(7)
    assert scene.resizing.fill(scene.incident())
    assert [node.name for node in state.world.places] == ["n0", "n3", "n2", "n7"]
    last, first = known.earlier
    assert last.owners == {0: (0,), 1: (0,), 2: (1,), 3: (1,)} and last.anew == {1, 3}
    assert first.owners == {0: (0,), 1: (0, 1), 2: (2,), 3: (2, 3)}
    assert state.world.resized is None and known.stages() == ((0, 1), (2, 3))


@pytest.mark.parametrize("names", [("pipeline", "data"), ("pipe", "ddp"), ("stage", "replicate")])
def test_a_pipeline_leaves_by_whichever_names_the_mesh_has(names: tuple[str, str]) -> None:
    mesh = dict.fromkeys(names, 2)
    scene = pipelines(Scene(enrol=False, mesh=mesh), mesh=mesh)
    assert scene.resizing.unfit() == ""
    assert scene.resizing.shrink(scene.lose("n1"))
    assert [node.name for node in scene.state.world.places] == ["n0", "n2"]


def test_pipelines_whose_stages_are_not_alike_or_not_the_same_for_all_are_refused() -> None:
    scene = pipelines(Scene(enrol=False, mesh=PIPELINES), alike=False)
    assert "pipeline stage are not known to hold the same" in scene.resizing.without(["n1"])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"stages": 0}, "an older robust_slurm, which knows no pipeline stages"),
        ({"mesh": {}, "stages": 0}, "an older robust_slurm"),
        ({"mesh": {}, "stages": 1}, "different meshes"),
        ({"mesh": {"dp": 2, "pp": 2}}, "different meshes"),
        ({"mesh": {"dp": 4}, "stages": 1}, "different meshes"),
        ({}, ""),
    ],
)
def test_ranks_that_tell_stages_apart_otherwise_than_robust_srun_are_refused(
    said: dict[str, Any], why: str
) -> None:
    """A rank of an older package takes positions and states of any stage for its own. Such a job
    becomes no smaller; if ranks say so only then, it does not grow."""
    scene = pipelines(Scene(enrol=False, mesh=PIPELINES))
    each = scene.job.enrolments.ranks[3]
    each.said = structs.replace(each.said, **said)
    assert why in (found := scene.resizing.without(["n1"])) and bool(why) == bool(found)
    each.said = structs.replace(each.said, mesh=PIPELINES, stages=2)
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.come(7)
    assert scene.resizing.ready
    for rank, new in (0, {}), (1, said):
        each = scene.job.enrolments.ranks[rank]
        each.said = structs.replace(each.said, **{"mesh": {"pp": 2, "dp": 1}, **new})
    assert scene.resizing.ready is (not why)


def test_ranks_without_a_pipeline_may_name_what_they_like() -> None:
    scene = Scene(mesh={"dp": 4})
    for rank, mesh in enumerate([{"dp": 4}, {"dp": 2, "ddp": 2}, {}, {"x": 1, "dp": 4}]):
        each = scene.job.enrolments.ranks[rank]
        each.said = structs.replace(each.said, mesh=mesh)
    assert scene.resizing.without(["n1"]) == ""


def test_ranks_that_say_what_cannot_be_are_refused_and_harm_nothing() -> None:
    """Worlds of 16 million ranks, meshes of other worlds: while all are there, and as it grows."""
    odd: list[dict[str, Any]] = [
        {"world": 1 << 24, "mesh": {"pp": 1 << 24}, "stages": 1 << 24},
        {"world": 2, "mesh": {"pp": 2}, "stages": 2},
        {"world": 1 << 24},
        {"mesh": {"pp": 2, "dp": 4}},
        {"mesh": {"pp": 10**9, "dp": 10**9}, "stages": 4},
    ]
    for said in odd:
        scene = pipelines(Scene(enrol=False, mesh=PIPELINES))
        before = say_all(scene, said)
        assert scene.resizing.without(["n1"]), said
        say_all(scene, before)
        assert scene.resizing.shrink(scene.lose("n1"))
        scene.come(7)
        say_all(scene, {"mesh": {"pp": 2, "dp": 1}})
        assert scene.resizing.ready
        say_all(scene, said | ({"world": 3} if said.get("world") == 2 else {}))
        assert not scene.resizing.ready and scene.resizing.without(["n2"]), said


def test_a_smaller_world_whose_ranks_tell_no_stages_apart_any_more_keeps_its_size() -> None:
    for mesh in {}, {"dp": 2}:
        scene = pipelines(Scene(enrol=False, min_nodes=1))
        assert scene.resizing.shrink(scene.lose("n1"))
        scene.come(7)
        say_all(scene, {"mesh": mesh, "stages": 1, "needs": (0, 1)})
        assert not scene.resizing.ready and "mesh" in scene.resizing.without(["n2"])


def test_a_job_whose_script_became_a_pipeline_after_it_had_lacked_a_node_counts_its_replicas() -> (
    None
):
    scene = Scene()
    assert scene.resizing.shrink(scene.lose("n1"))
    scene.come(7)
    assert scene.resizing.fill(scene.incident()) and scene.state.world.replica_ranks == 1
    for rank, each in scene.job.enrolments.ranks.items():
        needs = (rank // 2 * 2, rank // 2 * 2 + 1)
        each.said = structs.replace(each.said, mesh=PIPELINES, needs=needs, stages=2)
    assert scene.resizing.shrink(scene.lose("n0"))
    assert scene.state.world.replica_ranks == 2


def say_all(scene: Scene, said: dict[str, Any]) -> dict[str, Any]:
    """Let all ranks say this. Returns what the last one has said of it before."""
    before: dict[str, Any] = {}
    for each in scene.job.enrolments.ranks.values():
        before = {name: getattr(each.said, name) for name in said}
        each.said = structs.replace(each.said, **said)
    return before
