"""Durable steps of a pipeline whose stages have equal names and shapes, in another world."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from durable_snapshots import save_snapshot
from durable_tiers import store

from robust_slurm.checkpoint.capture.state import Share, State
from robust_slurm.checkpoint.durable import reader
from robust_slurm.checkpoint.training.mesh import RankIds
from robust_slurm.checkpoint.training.resuming import CheckpointError, from_durable
from robust_slurm.resizing.world import TrainingWorld


def made(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


@pytest.mark.parametrize(
    ("mesh", "loads"),
    [
        ({"pp": 2, "dp": 1}, False),
        ({}, False),  # nobody says what they were
        ({"dp": 2}, True),  # replicas that have drifted apart: those of rank 0
    ],
)
def test_another_stage_of_a_pipeline_is_never_loaded(
    mesh: dict[str, int], loads: bool, tmp_path: Path, tier: Path
) -> None:
    """Four ranks load what two have saved; rank 3 would get the weights of stage 0."""
    paths = []
    for rank in range(2):
        items, values = State(made(50 + rank), rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        path = tmp_path / f"own-{rank}-0.safetensors"
        paths.append(save_snapshot(path, pieces, values, mesh=mesh, rank=rank, world=2))
    store(tier, paths)
    own = made(7)
    state, world = State(own, rank=3), RankIds(3, 4, 0, 1)
    if loads:
        assert from_durable(state, own, str(tier), world, {}, None, print) == 100
        assert own["model"].weight.unique().tolist() == [50]
        return
    with pytest.raises(CheckpointError, match="differs between the ranks that saved it"):
        from_durable(state, own, str(tier), world, {}, None, print)
    assert own["model"].weight.unique().tolist() == [7]


class Position:
    """A loader, as far as a Checkpointer sees it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class GlobalPosition(Position):
    shared_position = True


def of_two_stages(rank: int, replicas: int, shares: int, first: int, kind: str) -> dict[str, Any]:
    """Return the objects of a rank: its parameters are ``first`` and its stage, as is its note;
    each share's position is ``first`` and the share."""
    stage = rank // replicas
    found = made(first + stage) | {"extra.note": Position(first + stage), "rng": None}
    mesh = {"pp": 2, "dp": replicas}
    own = TrainingWorld(rank, 2 * replicas, 2 * shares, mesh).shares
    by_share = {share: Position(first + share) for share in own}
    loaders = {"shares": by_share, "plain": Position(first), "global": GlobalPosition(first)}
    return found | ({"loader": loaders[kind]} if kind in loaders else {})


def at(objects: dict[str, Any]) -> dict[int, int]:
    loaders = objects.get("loader", {})
    loaders = loaders if isinstance(loaders, dict) else {0: loaders}
    return {share: each.at for share, each in loaders.items()}


@pytest.mark.parametrize("kind", ["shares", "plain", "global", "none"])
@pytest.mark.parametrize(
    ("saved", "now", "shares", "whole"),
    [  # replicas of the pipeline that saved it and that begin, of so many shares
        (1, 2, 2, 2),
        (2, 1, 2, 2),
        (2, 1, 2, 1),  # … and the job that begins has one share only
        (1, 2, 1, 2),
        (2, 1, 4, 2),
        (1, 2, 4, 2),
    ],
)
def test_each_rank_goes_on_with_its_own_stage(
    kind: str, saved: int, now: int, shares: int, whole: int,
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A rank's positions in the data are those of its own shares, or none of them is restored."""
    paths = []
    for rank in range(2 * saved):
        objects = of_two_stages(rank, saved, shares, 50, kind)
        alike = range(rank // saved * saved, (rank // saved + 1) * saved)
        items, values = State(objects, rank=rank, share=Share(tuple(alike))).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        about: dict[str, Any] = {"rank": rank, "world": 2 * saved, "needs": list(alike)}
        path = tmp_path / f"own-{rank}-0.safetensors"
        paths.append(save_snapshot(path, pieces, values, mesh={"pp": 2, "dp": saved}, **about))
    store(tier, paths)
    for rank in range(2 * now):
        for name, value in ("RANK", rank), ("WORLD_SIZE", 2 * now):
            monkeypatch.setenv(name, str(value))
        resized = f"{2 * whole}:{2 * now}" if now != whole else ""
        monkeypatch.setenv("ROBUST_RESIZED", resized)
        world, said = RankIds(rank, 2 * now, 0, 1), list[str]()
        own = of_two_stages(rank, now, whole, 0, kind)
        before, drawn = at(own), torch.get_rng_state()
        state, mesh = State(own, rank=rank), {"pp": 2, "dp": now}
        assert from_durable(state, own, str(tier), world, mesh, None, said.append) == 100
        stage = rank // now
        assert own["model"].weight.unique().tolist() == [50 + stage]
        assert own["extra.note"].at == 50 + stage
        taken = kind == "global" or (kind == "shares" and shares == whole)
        assert at(own) == {share: was + 50 if taken else was for share, was in before.items()}
        lost = sum("positions of the data loaders are not carried over" in line for line in said)
        assert lost == (kind != "none" and not taken), said
        assert torch.equal(torch.get_rng_state(), drawn), "generators start anew, and it is said"
        assert sum("generators start anew" in line for line in said) == 1


def test_layers_that_are_in_another_stage_now_are_found_by_their_names(
    tmp_path: Path, tier: Path
) -> None:
    """Two stages of one rank each saved it; four ranks begin, with a layer less in the first."""
    names = ["first", "second", "third"]

    def of(*layers: str) -> dict[str, Any]:
        return {
            "model": torch.nn.ModuleDict(
                {name: made(names.index(name))["model"] for name in layers}
            )
        }

    paths = []
    for rank, layers in enumerate([names[:2], names[2:]]):
        items, values = State(of(*layers), rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        path = tmp_path / f"own-{rank}-0.safetensors"
        about: dict[str, Any] = {"rank": rank, "world": 2, "mesh": {"pp": 2, "dp": 1}}
        paths.append(save_snapshot(path, pieces, values, **about))
    store(tier, paths)
    for rank, layers in (1, names[:1]), (2, names[1:]):
        own, world = of(*layers), RankIds(rank, 4, 0, 1)
        with torch.no_grad():
            for parameter in own["model"].parameters():
                parameter.fill_(7)
        state = State(own, rank=rank)
        assert from_durable(state, own, str(tier), world, {"pp": 2, "dp": 2}, None, print) == 100
        for name, layer in own["model"].items():
            assert layer.weight.unique().tolist() == [names.index(name)]


@pytest.mark.parametrize(
    ("more", "mesh"),
    [
        ({"needs": True}, {}),  # nothing tells the rank its stage
        ({"needs": True}, {"pp": 4, "dp": 1}),
        ({}, {"pp": 2, "dp": 2}),  # its ranks were not known to hold the same: experts, maybe
    ],
)
def test_ranks_that_are_not_known_to_be_of_one_stage_are_refused(
    more: dict[str, bool], mesh: dict[str, int], tmp_path: Path, tier: Path
) -> None:
    """Eight ranks saved it, four of each stage."""
    paths = []
    for rank in range(8):
        items, values = State(made(rank), rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        alike = list(range(rank // 4 * 4, rank // 4 * 4 + 4)) if more else [rank]
        path = tmp_path / f"own-{rank}-0.safetensors"
        about: dict[str, Any] = {"rank": rank, "world": 8, "needs": alike}
        paths.append(save_snapshot(path, pieces, values, mesh={"pp": 2, "dp": 4}, **about))
    store(tier, paths)
    own = made(7)
    with pytest.raises(CheckpointError, match="differs between the ranks that saved it"):
        from_durable(State(own, rank=3), own, str(tier), RankIds(3, 4, 0, 1), mesh, None, print)
    assert own["model"].weight.unique().tolist() == [7]


def test_positions_of_ranks_shares_are_not_those_of_replicas(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of DDP saved it; two pipelines begin, whose batch has two shares."""
    paths = []
    for rank in range(4):
        items, values = State(made(50) | {"loader": {rank: Position(50)}}, rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        path = tmp_path / f"own-{rank}-0.safetensors"
        paths.append(save_snapshot(path, pieces, values, rank=rank, world=4, mesh={"dp": 4}))
    store(tier, paths)
    monkeypatch.delenv("ROBUST_RESIZED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        said, loaders = list[str](), {rank % 2: Position(0)}
        own, world = made(0) | {"loader": loaders}, RankIds(rank, 4, 0, 1)
        state, mesh = State(own, rank=rank), {"pp": 2, "dp": 2}
        assert from_durable(state, own, str(tier), world, mesh, None, said.append) == 100
        assert loaders[rank % 2].at == 0
        assert any("positions of the data loaders are not carried over" in line for line in said)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 0}, {"pp": 2, "dp": 3}])
def test_a_step_whose_mesh_is_not_of_its_ranks_has_no_stages(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Mock(world=2, mesh=mesh)
    monkeypatch.setattr(reader.tier, "read_manifest", lambda _where: manifest)
    assert reader.load_of_stage("/nowhere", 1, 0, 4, {"pp": 2, "dp": 2}, ()) == []
