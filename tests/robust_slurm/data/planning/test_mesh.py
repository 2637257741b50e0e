"""The mesh of a plan: which ranks have the same share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from robust_slurm.data.errors import DataError
from robust_slurm.data.planning.mesh import RankMesh
from robust_slurm.resizing.shares import shares_of


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ({"dp": 4}, [0, 1, 2, 3]),
        ({"dp": 2, "pp": 2}, [0, 0, 1, 1]),
        ({"pp": 2, "dp": 2}, [0, 1, 0, 1]),
        ({"dp_replicate": 2, "cp": 2, "dp_shard": 2}, [0, 1, 0, 1, 2, 3, 2, 3]),
        ({"tp": 3, "dp": 1}, [0, 0, 0]),
    ],
)
def test_ranks_that_differ_in_other_dimensions_have_the_same_share(
    sizes: dict[str, int], shares: list[int]
) -> None:
    mesh = RankMesh(sizes)
    assert [mesh.shares(rank, mesh.size) for rank in range(mesh.size)] == [(s,) for s in shares]


def test_a_smaller_world_has_every_share_once_in_each_group() -> None:
    for size in range(1, 5):
        assert [RankMesh({"dp": 4}).shares(rank, size) for rank in range(size)] == [
            shares_of(rank, size, 4) for rank in range(size)
        ]
    mesh = RankMesh({"pp": 2, "dp": 6})
    for size in (2, 4, 8, 12):
        found = Counter(share for rank in range(size) for share in mesh.shares(rank, size))
        assert found == dict.fromkeys(range(6), 2)


@pytest.mark.parametrize(
    ("sizes", "size", "why"),
    [
        ({}, 1, "no dimensions is data-parallel"),
        ({"pp": 2}, 2, "none of pp is data-parallel"),
        ({"dp": 0}, 1, "dp is 0"),
        ({"": 2}, 2, "not the name"),
        ({"dp": 2}, 4, "dp 2 are 2 ranks, but this job has 4"),
        ({"dp": 4, "tp": 2}, 5, "by multiples of 2"),
    ],
)
def test_wrong_meshes(sizes: Any, size: int, why: str) -> None:
    with pytest.raises(DataError, match=why):
        RankMesh(sizes).shares(0, size)
