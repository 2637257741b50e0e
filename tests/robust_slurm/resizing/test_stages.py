"""Pipelines in worlds of other sizes: a stage's ranks, shares, and whose state is whose."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import pytest
from test_world import world_of

import robust_slurm
from robust_slurm.resizing.change import fewer, more, owners
from robust_slurm.resizing.dimensions import PIPELINE
from robust_slurm.resizing.shares import holder
from robust_slurm.resizing.stages import is_other, pipelined, ranks_by_stage, replica_of, stage_of
from robust_slurm.resizing.world import TrainingWorld


@pytest.mark.parametrize(
    ("mesh", "stages"),
    [
        ({"pp": 2, "dp": 3}, [(0, 1, 2), (3, 4, 5)]),
        ({"dp": 3, "pp": 2}, [(0, 2, 4), (1, 3, 5)]),
        ({"dp_replicate": 3, "dp_shard": 2}, [(0, 1, 2, 3, 4, 5)]),
        ({"ddp": 3, "pipe": 2}, [(0, 2, 4), (1, 3, 5)]),
        ({"dp": 6, "pp": 1}, [(0, 1, 2, 3, 4, 5)]),
        ({}, [(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_ranks_of_a_stage_differ_in_data_only(mesh: dict[str, int], stages: Any) -> None:
    assert list(ranks_by_stage(mesh, 6).values()) == stages
    for ranks in stages:
        assert [replica_of(rank, 6, mesh) for rank in ranks] == [
            (number, len(ranks)) for number in range(len(ranks))
        ]


def test_a_state_of_another_stage_is_told_whatever_the_order_of_the_mesh() -> None:
    first, last = stage_of(0, {"pp": 2, "dp": 2}), stage_of(3, {"pp": 2, "dp": 2})
    assert first == stage_of(2, {"dp": 2, "pp": 2}) != last
    for resized in (True, False):
        assert is_other(first, last, resized=resized) and not is_other(last, last, resized=resized)
        assert is_other(first, stage_of(0, {"pp": 4}), resized=resized)
    assert not is_other(first, (("cp", 1, 2), *first), resized=False), "it holds the same"
    assert is_other(first, (), resized=True) and is_other((), first, resized=True)
    assert not is_other(first, (), resized=False), "its world is the same, and had no mesh"


@pytest.mark.parametrize("name", sorted(PIPELINE))
def test_any_name_of_a_pipeline_s_dimension_tells_stages_apart(name: str) -> None:
    """A script that was updated names its dimensions in another order, or otherwise: rank 1 was of
    the first stage, and would go on with that one's state in the second."""
    before, after = {name: 2, "dp": 2}, {"dp": 2, name: 2}
    assert pipelined(before) == before and pipelined({name: 1, "dp": 4}) == {}
    for there in (before, {"pp": 2, "dp": 2}):
        assert is_other(stage_of(1, after), stage_of(1, there), resized=False)
        assert not is_other(stage_of(3, after), stage_of(3, there), resized=False)


def test_two_dimensions_of_a_pipeline_may_be_renamed() -> None:
    """Coordinates were compared in the order of the names: no rank could go on."""
    before, after = {"pipe": 2, "stage": 3}, {"pp": 2, "pipeline": 3}
    for rank in range(6):
        for other in range(6):
            stages = stage_of(rank, after), stage_of(other, before)
            assert is_other(*stages, resized=False) == (rank != other)


@pytest.mark.parametrize("order", [("pp", "dp"), ("dp", "pp")])
def test_pipelines_shrink_and_grow_and_no_rank_is_given_another_stage_s_state(order: Any) -> None:
    """Random losses and returns, two ranks a node or one; all that a rank is given was saved by
    ranks of its stage, its share's position among it."""
    chance = random.Random(7)

    def mesh_of(replicas: int, pp: int) -> dict[str, int]:
        return {name: {"pp": pp, "dp": replicas}[name] for name in order}

    for _ in range(200):
        pp, replicas, each = 2, 2 * chance.randint(1, 4), chance.randint(1, 2)
        size = original = pp * replicas
        full = [tuple(range(n, n + each)) for n in range(0, size, each)]
        groups = list(ranks_by_stage(mesh_of(replicas, pp), size).values())
        ranks, home, lacking = full, list(range(len(full))), list[tuple[int, ...]]()
        whole = groups
        for _ in range(6):
            before = size // pp
            if lacking and chance.random() < 0.5:
                come = lacking.pop(chance.randrange(len(lacking)))
                change = more(ranks, full, home, come, groups)
                home = sorted([*home, *come])
            else:
                try:
                    change = fewer(ranks, [chance.randrange(len(ranks))], whole, 1)
                except ValueError:
                    continue
                lacking += [tuple(home[place] for place in places) for places in change.left]
                home = [home[place] for place in change.places]
            assert change.new % pp == 0
            there, here = mesh_of(before, pp), mesh_of(change.new // pp, pp)
            need = owners(change.origin, size, change.new, original, (), whole)
            computed: dict[Any, list[int]] = {}
            for rank in range(change.new):
                stage = stage_of(rank, here)
                assert {stage_of(old, there) for old in need[rank]} == {stage}, (rank, need)
                own = TrainingWorld(rank, change.new, original, here).shares
                computed.setdefault(stage, []).extend(own)
                alike = ranks_by_stage(there, size)[stage]
                assert {alike[holder(share, before)] for share in own} <= set(need[rank])
            assert all(sorted(own) == list(range(replicas)) for own in computed.values())
            ranks, size = list(change.ranks), change.new
            whole = list(ranks_by_stage(here, size).values())


PIPELINES = {"RANK": "3", "WORLD_SIZE": "4", "ROBUST_RESIZED": "6:4", "ROBUST_REPLICA_RANKS": "2"}


def test_the_ranks_of_a_replica_have_its_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = {"pp": 2, "dp": 2}
    for rank, shares in enumerate([(0, 2), (1,), (0, 2), (1,)]):
        world_of({**PIPELINES, "RANK": str(rank)}, monkeypatch, MappingProxyType(mesh))
        whole = robust_slurm.world(mesh)
        assert (whole.shares, whole.share_count, whole.scale) == (shares, 3, 4 / 6)
        assert tuple(robust_slurm.accumulate(mesh=mesh)) == shares
    whole = world_of({"RANK": "3", "WORLD_SIZE": "4"}, monkeypatch, mesh)
    assert (whole.shares, whole.share_count, whole.resized) == ((1,), 2, False)


@pytest.mark.parametrize(
    ("env", "mesh", "error"),
    [
        (PIPELINES, None, RuntimeError),
        (PIPELINES, {"dp": 4}, RuntimeError),
        ({**PIPELINES, "ROBUST_REPLICA_RANKS": "1"}, {"pp": 2, "dp": 2}, RuntimeError),
        (PIPELINES, {"pp": 2, "dp": 3}, ValueError),
    ],
)
def test_shares_of_other_replicas_than_the_job_s_are_refused(
    env: dict[str, str], mesh: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match="mesh"):
        world_of(env, monkeypatch, mesh)
