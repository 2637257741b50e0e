"""``robust_slurm.world()`` and ``accumulate()``, by the environment of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import robust_slurm
from robust_slurm.resizing.world import TrainingWorld

NAMES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "ROBUST_RESIZED")
NAMES += ("ROBUST_REPLICA_RANKS",)


def world_of(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, mesh: Any = None
) -> TrainingWorld:
    """The world of a process whose variables are these."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return robust_slurm.world(mesh)


@pytest.mark.parametrize(
    ("env", "shares", "scale"),
    [
        ({}, (0,), 1.0),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2,), 1.0),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1,), 1.0),
        ({"RANK": "0", "WORLD_SIZE": "3", "ROBUST_RESIZED": "4:3"}, (0, 3), 0.75),
        ({"RANK": "1", "WORLD_SIZE": "3", "ROBUST_RESIZED": "4:3"}, (1,), 0.75),
        # A process of another world in it, such as a data server alone, has its own batch.
        ({"RANK": "0", "WORLD_SIZE": "1", "ROBUST_RESIZED": "4:3"}, (0,), 1.0),
        ({"RANK": "7", "WORLD_SIZE": "3", "ROBUST_RESIZED": "4:3"}, (0,), 1.0),
        ({"RANK": "0", "WORLD_SIZE": "3", "ROBUST_RESIZED": "3:4"}, (0,), 1.0),
    ],
)
def test_the_shares_of_a_rank(
    env: dict[str, str], shares: tuple[int, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(env, monkeypatch)
    assert (world.shares, world.scale, world.resized) == (shares, scale, scale != 1.0)
    assert tuple(robust_slurm.accumulate()) == shares


@pytest.mark.parametrize(
    "mesh", [{"dp": 3}, {"dp": "4"}, {"dp": "2", "tp": "2"}, {"dp": -2, "tp": -2}]
)
def test_a_mesh_of_another_world(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"mesh: .* is not of the 4 ranks of this world"):
        world_of({"RANK": "1", "WORLD_SIZE": "4"}, monkeypatch, mesh)


class Quiet:
    """A model that notes at which shares it does not talk to others."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False


def test_gradients_are_summed_up_at_the_last_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "ROBUST_RESIZED": "6:2"}.items():
        monkeypatch.setenv(name, value)
    model = Quiet()
    assert [(share, model.on) for share in robust_slurm.accumulate(model)] == [
        (0, True), (2, True), (4, False),
    ]  # fmt: skip
    assert not model.on


class Sharded:
    """A model of ``fully_shard``: its passes need all ranks."""

    def set_requires_gradient_sync(self, on: bool) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("env", "passes"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3", "ROBUST_RESIZED": "4:3"}, [0, 3]),
        ({"RANK": "1", "WORLD_SIZE": "3", "ROBUST_RESIZED": "4:3"}, [1, None]),
        ({"RANK": "1", "WORLD_SIZE": "2", "ROBUST_RESIZED": "4:2"}, [1, 3]),
        ({"RANK": "1", "WORLD_SIZE": "4"}, [1]),
    ],
)
def test_all_ranks_of_a_sharded_model_compute_as_often(
    env: dict[str, str], passes: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(env, monkeypatch)
    scales = []
    for share in robust_slurm.accumulate(Sharded()):
        scales.append(world.scale if share is None else world.scale * world.original / world.size)
    assert scales == [float(share is not None) for share in passes]
    assert list(robust_slurm.accumulate(Sharded())) == passes
    assert world.scale == world.size / world.original
    cut_off = robust_slurm.accumulate(Sharded())
    for _ in passes:
        next(cut_off)  # an exception ends the step; its frame is kept
    again = robust_slurm.accumulate(Sharded())
    next(again)
    assert world.scale == world.size / world.original
    for _ in passes[1:]:
        next(again)
    cut_off.close()
    assert world.scale == (world.size / world.original if passes[-1] is not None else 0.0)
    again.close()
