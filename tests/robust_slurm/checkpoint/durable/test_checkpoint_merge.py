"""Merging the parts of all ranks into one set of names that torch can load."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_steps import entry, part

from robust_slurm.checkpoint.durable.merge import Merged, overlap
from robust_slurm.checkpoint.durable.merge import merge as merge_outlines
from robust_slurm.checkpoint.durable.parts import Outline, Part, encode_part, parse_outline
from robust_slurm.checkpoint.format.layout import Entry


def outlines(parts: Iterable[Part]) -> list[Outline]:
    """Parse outlines like the commit: from the ranks' files, each form once."""
    known: dict[bytes, Any] = {}
    return [parse_outline(encode_part(part), known) for part in parts]


def merge(parts: Sequence[Part]) -> Merged:
    return merge_outlines(outlines(parts))


def names(parts: Sequence[Part]) -> dict[str, list[int]]:
    merged = merge(parts)
    assert not merged.problems
    return {t.name: t.ranks for t in merged.tensors}


def half(fqn: str, which: int, kind: str = "shared") -> Entry:
    return entry(fqn, (5, 2), kind, whole=(10, 2), at=(5 * which, 0))


def test_row_blocks_of_peers_form_one_tensor() -> None:
    peers = [
        part(0, [half("model.w", 0), entry("model.b", (3,), "shared")], needs=[0, 1]),
        part(1, [half("model.w", 1), entry("optimizer.step", (), "shared")], needs=[0, 1]),
    ]
    assert names(peers) == {"model.w": [0, 1], "model.b": [0], "optimizer.step": [1]}


def test_private_ones_are_the_lowest_ranks_and_others_stand_aside() -> None:
    parts = [part(r, [entry("model.mean", (3,))], world=3) for r in range(3)]
    assert names(parts) == {"model.mean": [0], "model.mean@1": [1], "model.mean@2": [2]}


def test_private_ones_that_hold_the_same_are_one() -> None:
    """The optimizer's step, which every rank of a sharded model keeps for itself."""
    parts = [
        part(r, [entry("step", ()), entry("mean", (3,))], world=4)._replace(
            contents=("=07", f"={r % 2}")
        )
        for r in range(4)
    ]
    assert names(parts) == {"step": [0], "mean": [0], "mean@1": [1]}
    unknown = [p._replace(contents=("=07", "")) for p in parts[:2]]
    assert names(unknown) == {"step": [0], "mean": [0], "mean@1": [1]}


def test_a_suffix_never_meets_a_real_name() -> None:
    parts = [
        part(0, [entry("a", (1,)), entry("a@1", (2,))]),
        part(1, [entry("a", (1,))]),
    ]
    assert names(parts) == {"a": [0], "a@1": [0], "a@1'": [1]}


def test_stages_that_use_one_name_by_data_parallel_group() -> None:
    """dp 2 x pp 2, pp varies fastest: ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1."""
    parts = [
        part(rank, [half("model.w", rank // 2)], world=4, needs=[rank % 2, rank % 2 + 2])
        for rank in range(4)
    ]
    assert names(parts) == {"model.w": [0, 2], "model.w@1": [1, 3]}


@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "pp": 2}])
def test_stages_that_use_one_name_for_distributed_tensors(mesh: dict[str, int]) -> None:
    parts = [
        part(rank, [half("model.w", rank // 2, "block")], world=4, mesh=mesh) for rank in range(4)
    ]
    assert names(parts) == {"model.w": [0, 2], "model.w@1": [1, 3]}


def test_empty_shards_count_for_nothing() -> None:
    parts = [
        part(0, [entry("w", (1, 4), "block", whole=(1, 4), at=(0, 0))]),
        part(1, [entry("w", (0, 4), "block", whole=(1, 4), at=(1, 0))]),
    ]
    assert names(parts) == {"w": [0]}


def test_an_empty_tensor_is_complete() -> None:
    assert names([part(0, [entry("w", (0, 4))], world=1)]) == {"w": [0]}


def test_blocks_cut_in_two_dimensions_and_unevenly() -> None:
    rows, columns = [(0, 3), (3, 3), (6, 1)], [(0, 4), (4, 1)]
    cells = [(r, c) for r in rows for c in columns]
    parts = [
        part(i, [entry("w", (r[1], c[1]), "block", whole=(7, 5), at=(r[0], c[0]))], world=6)
        for i, (r, c) in enumerate(cells)
    ]
    assert names(parts) == {"w": [0, 1, 2, 3, 4, 5]}
    (problem,) = merge([*parts[:5], parts[0]._replace(snapshot=parts[0].snapshot._replace(rank=5))]
                       ).problems[:1]  # fmt: skip
    assert "not complete" in problem


def test_replicas_of_a_shard_are_a_tensor_of_their_own() -> None:
    parts = [part(r, [half("w", r % 2, "block")], world=4) for r in range(4)]
    assert names(parts) == {"w": [0, 1], "w@2": [2, 3]}


@pytest.mark.slow
def test_the_time_grows_with_the_ranks_not_with_their_square() -> None:
    """2,048 ranks of a sharded model whose optimizers keep a scalar for each parameter."""
    world = 2048
    parts = outlines(
        part(r, [entry(f"w{i}.step", ()) for i in range(20)]
             + [entry("w", (1, 8), "block", whole=(world, 8), at=(r, 0))], world=world)
        for r in range(world)
    )  # fmt: skip
    began = time.process_time()
    merged = merge_outlines(parts)
    assert time.process_time() - began < 5  # 16 s where every variant was looked at in turn
    assert not merged.problems
    assert len(merged.tensors) == 20 * world + 1


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([(0, 5)], "not complete: 10 of 20"),
        ([(0, 5), (6, 4)], "not complete"),
        ([(0, 6), (5, 5)], "overlap"),
        ([(0, 6), (5, 4)], "overlap"),
    ],
)
def test_blocks_that_do_not_cover_a_tensor_once(blocks: list[tuple[int, int]], says: str) -> None:
    parts = [
        part(r, [entry("w", (n, 2), "block", whole=(10, 2), at=(begin, 0))], world=len(blocks))
        for r, (begin, n) in enumerate(blocks)
    ]
    (problem,) = merge(parts).problems
    assert says in problem
    assert "w" in problem


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), max_size=8))
def test_overlap_is_what_comparing_all_pairs_says(boxes: list[tuple[int, int, int, int]]) -> None:
    blocks = [Entry("w", "F32", (h, w), "w", (20, 20), (y, x), "block") for y, x, h, w in boxes]
    cells = [{(y + i, x + j) for i in range(h) for j in range(w)} for y, x, h, w in boxes]
    apart = sum(map(len, cells)) == len(set().union(*cells)) if cells else True
    assert overlap(blocks) == (not apart)


def test_values_are_the_lowest_ranks() -> None:
    parts = [part(0, [], plain=["a"]), part(1, [], plain=["a", "b"])]
    assert {v.name: v.rank for v in merge(parts).values} == {"a": 0, "b": 1}


def test_stages_with_their_own_groups_have_values_by_parameter() -> None:
    parts = [
        part(r, [], plain=["optimizer.param_groups.0.lr", "optimizer.param_groups.0.params"],
             groups=[("optimizer.param_groups.0", (f"l{r}.w", f"l{r}.b"))])
        for r in range(2)
    ]  # fmt: skip
    found = {v.name: v.rank for v in merge(parts).values}
    assert found["optimizer.param_groups.0.lr"] == 0
    assert found["optimizer.param_groups.l0.w.lr"] == 0
    assert found["optimizer.param_groups.l1.b.lr"] == 1
    assert not any(name.endswith("b.params") for name in found)
    alike = [p._replace(groups=parts[0].groups) for p in parts]
    assert len(merge(alike).values) == 2
