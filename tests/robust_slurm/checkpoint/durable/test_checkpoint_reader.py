"""Loading durable checkpoints into ranks of the shape that saved them; damage is told first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    private,
    save_snapshot,
    save_world,
    sharded,
    trained,
)
from durable_tiers import RUN, Position, flat, load_alone, same, store

from robust_slurm.checkpoint.capture import values
from robust_slurm.checkpoint.durable import reader
from robust_slurm.checkpoint.durable.export import export
from robust_slurm.checkpoint.durable.files import DurableError


@pytest.mark.parametrize("cut", [data_parallel, sharded])
def test_each_rank_gets_back_what_it_saved(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any], cut: Any
) -> None:
    store(tier, save_world(tmp_path, trained_state, 3, cut))
    whole = flat(trained_state)
    for rank in range(3):
        loaded = reader.load(tier, 100, rank, 3, {})
        others = [r for r in range(3) if r != rank] if cut is data_parallel else []
        assert [each.snapshot.rank for each in loaded] == [rank, *others]
        for each in loaded:
            assert len(each.tensors) == len(each.snapshot.entries)
            for entry in each.snapshot.entries:
                got = each.tensors[entry.name]
                if entry.fqn == "rng.torch":
                    assert got[0] == each.snapshot.rank
                    continue
                expected = whole[entry.fqn]
                for dim, (start, size) in enumerate(zip(entry.offsets, entry.shape, strict=True)):
                    expected = expected.narrow(dim, start, size)
                assert torch.equal(got, expected)
        kept = values.decode(loaded[0].snapshot.values["loader"], lambda ref: ref)
        assert kept == {"position": 7 + rank, "seed": [1, 2]}


def test_what_is_loaded_belongs_to_the_loader(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any]
) -> None:
    store(tier, save_world(tmp_path, trained_state, 1, sharded))
    (loaded,) = reader.load(tier, 100, 0, 1, {})
    loaded.tensors["model.first.weight"].zero_()
    assert torch.equal(loaded.tensors["model.first.weight"], trained_state["model"]["first.weight"])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("bfloat16", (3, 5)), ("float16", (0, 4)), ("bool", (7,)), ("complex64", (2,)),
     ("float8_e4m3fn", (9,)), ("int64", ()), ("uint8", (1, 1, 1))],
)  # fmt: skip
def test_types_and_shapes(tmp_path: Path, tier: Path, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    pieces = [private("model.x", tensor), private("model.odd", torch.ones(3, dtype=torch.uint8))]
    store(tier, [save_snapshot(tmp_path / "s", pieces, {})])
    (loaded,) = reader.load(tier, 100, 0, 1, {})
    got = loaded.tensors["model.x"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(got.view(torch.uint8) if shape else got,
                       tensor.view(torch.uint8) if shape else tensor)  # fmt: skip


@pytest.mark.parametrize(
    ("world", "mesh", "says"),
    [(2, {}, "saved by 3 ranks, this is 2 ranks"), (3, {"dp": 3}, r"this is 3 ranks \(dp 3\)")],
)
def test_another_shape_is_told_apart(
    tmp_path: Path,
    tier: Path,
    trained_state: dict[str, Any],
    world: int,
    mesh: dict[str, int],
    says: str,
) -> None:
    store(tier, save_world(tmp_path, trained_state, 3, sharded))
    with pytest.raises(reader.OtherShape, match=says):
        reader.load(tier, 100, 0, world, mesh)


def test_damage_is_found_before_anything_is_handed_out(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any]
) -> None:
    where = store(tier, save_world(tmp_path, trained_state, 2, data_parallel))
    data = where / f"{RUN}-1_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    model, optimizer = trained(5)
    objects = {"model": model, "optimizer": optimizer, "loader": Position(), "rng": None}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DurableError, match="differs from its digest"):
        reader.load(tier, 100, 0, 2, {})
    with pytest.raises(DurableError, match="differs from its digest"):
        load_alone(tier, objects)
    same(before, dict(model.state_dict()))
    with pytest.raises(DurableError, match="differs from its digest"):
        export(where, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_missing_steps_and_ranks(tmp_path: Path, tier: Path, trained_state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, trained_state, 2, sharded))
    with pytest.raises(DurableError, match="never committed"):
        reader.load(tier, 99, 0, 2, {})
    with pytest.raises(DurableError, match="no rank 2"):
        reader.load(tier, 100, 2, 2, {})
    (where / f"{RUN}-rank-0.json").unlink()
    with pytest.raises(DurableError, match="rank 0"):
        reader.load(tier, 100, 0, 2, {})


def test_metadata_is_never_unpickled(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any]
) -> None:
    where = store(tier, save_world(tmp_path, trained_state, 2, data_parallel))
    (where / ".metadata").write_bytes(b"cos\nabort\n(tR.")  # would end the process
    assert len(reader.load(tier, 100, 0, 2, {})) == 2
    model, optimizer = trained(5)
    load_alone(tier, {"model": model, "optimizer": optimizer, "loader": Position(), "rng": None})


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_records_are_unpickled_without_running_anything(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the digests were made to fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(values, "decode", lambda encoded, tensor: {"lr": Evil()})
    where = store(tier, save_world(tmp_path, trained_state, 1, sharded))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "optimizer.lr" in export(where, tmp_path / "x.pt").left_out
    assert not (tmp_path / "pwned").exists()
