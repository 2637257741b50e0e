"""Loading durable checkpoints: by us, by plain torch in any shape, and whole as one file."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    Net,
    data_parallel,
    private,
    rows,
    save_snapshot,
    save_world,
    sharded,
    state_of,
    tensors_of,
    trained,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from robust_slurm.checkpoint import durable, reader, values
from robust_slurm.checkpoint.commit import Request, commit
from robust_slurm.checkpoint.dcp_write import write
from robust_slurm.checkpoint.durable_files import DurableError
from robust_slurm.checkpoint.export import export

RUN = "77.e0"
TESTS = str(Path(__file__).parent)


def store(tier: Path, sources: Sequence[Path], step: int = 100) -> Path:
    tier.mkdir(exist_ok=True)
    for source in sources:
        write(str(source), tier, RUN)
    commit(Request(tier, step, len(sources), RUN, 0, 2), threading.Event())
    return durable.step_dir(tier, step)


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return state_of(*trained())


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tensors_of({key: state[key] for key in ("model", "optimizer")})[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


# ---------------------------------------------------------------- the same shape


@pytest.mark.parametrize("cut", [data_parallel, sharded])
def test_each_rank_gets_back_what_it_saved(
    tmp_path: Path, tier: Path, state: dict[str, Any], cut: Any
) -> None:
    store(tier, save_world(tmp_path, state, 3, cut))
    whole = flat(state)
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
    tmp_path: Path, tier: Path, state: dict[str, Any]
) -> None:
    store(tier, save_world(tmp_path, state, 1, sharded))
    (loaded,) = reader.load(tier, 100, 0, 1, {})
    loaded.tensors["model.first.weight"].zero_()
    assert torch.equal(loaded.tensors["model.first.weight"], state["model"]["first.weight"])


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
    tmp_path: Path, tier: Path, state: dict[str, Any], world: int, mesh: dict[str, int], says: str
) -> None:
    store(tier, save_world(tmp_path, state, 3, sharded))
    with pytest.raises(reader.OtherShape, match=says):
        reader.load(tier, 100, 0, world, mesh)


def test_damage_is_found_before_anything_is_handed_out(
    tmp_path: Path, tier: Path, state: dict[str, Any]
) -> None:
    where = store(tier, save_world(tmp_path, state, 2, data_parallel))
    data = where / f"{RUN}-1_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    asked = {"model": get_model_state_dict(trained(5)[0])}
    before = {name: tensor.clone() for name, tensor in asked["model"].items()}
    with pytest.raises(DurableError, match="differs from its digest"):
        reader.load(tier, 100, 0, 2, {})
    with pytest.raises(DurableError, match="differs from its digest"):
        reader.load_resharded(tier, 100, asked)
    same(before, asked["model"])
    with pytest.raises(DurableError, match="differs from its digest"):
        export(where, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_missing_steps_and_ranks(tmp_path: Path, tier: Path, state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, state, 2, sharded))
    with pytest.raises(DurableError, match="never committed"):
        reader.load(tier, 99, 0, 2, {})
    with pytest.raises(DurableError, match="no rank 2"):
        reader.load(tier, 100, 2, 2, {})
    (where / f"{RUN}-rank-0.json").unlink()
    with pytest.raises(DurableError, match="rank 0"):
        reader.load(tier, 100, 0, 2, {})


def test_metadata_is_never_unpickled(tmp_path: Path, tier: Path, state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, state, 2, data_parallel))
    (where / ".metadata").write_bytes(b"cos\nabort\n(tR.")  # would end the process
    assert len(reader.load(tier, 100, 0, 2, {})) == 2
    reader.load_resharded(tier, 100, {"model": get_model_state_dict(trained(5)[0])})


# ---------------------------------------------------------------- another shape, one process


@pytest.mark.parametrize("cut", [data_parallel, sharded])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_resharding_into_one_process(
    tmp_path: Path, tier: Path, state: dict[str, Any], cut: Any, world: int
) -> None:
    store(tier, save_world(tmp_path, state, world, cut))
    model, optimizer = trained(5)
    asked = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    carried = reader.load_resharded(tier, 100, asked)
    set_model_state_dict(model, asked["model"])
    set_optimizer_state_dict(model, optimizer, asked["optimizer"])
    same(flat(state_of(model, optimizer)), flat(state))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    said = " ".join(carried.notes)
    for word in ("random", "loader", "buffers"):
        assert word in said
    assert carried.first.snapshot.rank == 0
    assert carried.first.tensors["rng.torch"][0] == 0


def test_what_the_checkpoint_lacks_is_named(
    tmp_path: Path, tier: Path, state: dict[str, Any]
) -> None:
    store(tier, save_world(tmp_path, state, 2, sharded))
    with pytest.raises(DurableError, match=r"Missing key .*model\.other"):
        reader.load_resharded(tier, 100, {"model": {"other": torch.zeros(3)}})
    with pytest.raises(DurableError, match=r"Size mismatch .*first\.weight"):
        reader.load_resharded(tier, 100, {"model": {"first.weight": torch.zeros(3)}})


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_records_are_unpickled_without_running_anything(
    tmp_path: Path, tier: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the digests were made to fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(values, "decode", lambda encoded, tensor: {"lr": Evil()})
    where = store(tier, save_world(tmp_path, state, 1, sharded))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DurableError, match="not loaded"):
        reader.load_resharded(tier, 100, {"optimizer": {"lr": 1.0}})
    with pytest.raises(DurableError, match="not loaded"):
        export(where, tmp_path / "x.pt")
    assert not (tmp_path / "pwned").exists()


# ---------------------------------------------------------------- torch's own tools


def test_dcp_to_torch_save(tmp_path: Path, tier: Path, state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, state, 3, data_parallel))
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(whole["model"], state["model"])
    same(flat(whole), flat(state))
    assert whole["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert whole["loader"]["position"] == 7
    assert whole["model.norm.running_mean@2"].shape == (10,)


def test_states_that_do_not_fit_into_one_another(tmp_path: Path, tier: Path) -> None:
    """Names that clash within a rank or between ranks cost others the name, never the save."""
    extras: list[dict[str, Any]] = [
        {"extra.a": 3, "extra.l": [torch.ones(2), 1], "extra.g": {"h": torch.ones(1)}},
        {
            "extra.a": {"b": 4, "t": torch.ones(3)},
            "extra.l": {"x": 1},
            "extra.g": torch.ones(4),
            "extra.c": {"d.e": 1, "d": {"e": 2}},
            "extra.f": {1: "int", "1": "text"},
        },
    ]
    paths = []
    for rank, extra in enumerate(extras):
        found, kept = tensors_of(extra)
        pieces = [private(fqn, tensor) for fqn, tensor in found.items()]
        paths.append(save_snapshot(tmp_path / f"own-{rank}", pieces, kept, rank=rank, world=2))
    where = store(tier, paths)
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["extra.a"].keys() == {"t", "b"}
    assert torch.equal(whole["extra.l"][0], torch.ones(2))
    assert whole["extra.l.x"] == 1
    assert whole["extra.g@1"].shape == (4,)
    export(where, tmp_path / "ours.pt")
    (loaded,) = reader.load(tier, 100, 1, 2, {})
    got = values.decode(loaded.snapshot.values["extra.c"], lambda ref: ref)
    assert got == {"d.e": 1, "d": {"e": 2}}


WITHOUT_US = """
import sys
sys.modules["robust_slurm"] = None  # importing it, or unpickling something of it, fails
sys.path.insert(0, {tests!r})
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict)

torch.manual_seed(3)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.norm = torch.nn.BatchNorm1d(10)
        self.last = torch.nn.Linear(10, 3)
        self.scale = torch.nn.Parameter(torch.tensor(9.0))

model = Net()
if {kind!r} != "single":
    dist.init_process_group("gloo", init_method="file://" + {rendezvous!r},
                            rank=int(os.environ["RANK"]), world_size={world})
if {kind!r} == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
if {kind!r} == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", ({world},))
    # A parameter without dimensions cannot be sharded: it stays a plain one.
    fully_shard(model, mesh=mesh, ignored_params={{model.scale}})
plain = model.module if {kind!r} == "ddp" else model
large = [p for p in plain.parameters() if p.ndim > 1]
small = [p for p in plain.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{{"params": large}}, {{"params": small}}], lr=0.5, foreach=False)
state = {{"model": get_model_state_dict(model),
         "optimizer": get_optimizer_state_dict(model, optimizer)}}
dcp.load(state, checkpoint_id={where!r})
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
out = {{"model": get_model_state_dict(model, options=whole),
       "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
       "lr": [g["lr"] for g in optimizer.param_groups]}}
if {kind!r} == "single" or dist.get_rank() == 0:
    torch.save(out, {out!r})
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


def run_ranks(code: str, world: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        assert [rank.wait(200) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def load_without_us(where: Path, scratch: Path, kind: str, world: int) -> dict[str, Any]:
    out = scratch / "out.pt"
    code = WITHOUT_US.format(
        tests=TESTS, kind=kind, world=world, rendezvous=str(scratch / "rendezvous"),
        where=str(where), out=str(out),
    )  # fmt: skip
    run_ranks(code, world)
    found = torch.load(out, weights_only=True)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("cut", "saved", "kind", "world"),
    [
        (data_parallel, 3, "single", 1),
        (data_parallel, 3, "ddp", 2),
        (data_parallel, 2, "fsdp", 2),
        (sharded, 3, "fsdp", 2),
        (sharded, 4, "single", 1),
    ],
)
def test_plain_dcp_loads_it_without_us(
    tmp_path: Path,
    tier: Path,
    state: dict[str, Any],
    cut: Any,
    saved: int,
    kind: str,
    world: int,
) -> None:
    where = store(tier, save_world(tmp_path, state, saved, cut))
    found = load_without_us(where, tmp_path, kind, world)
    same(found["model"], state["model"])
    same(flat(found), flat(state))
    assert found["lr"] == [0.01, 0.01]


SAVED_BY_RANKS = """
import os, sys
sys.path[:0] = [{tests!r}]
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from durable_snapshots import Net, save_snapshot
from robust_slurm.checkpoint.state import Share, State

rank, world = int(os.environ["RANK"]), {world}
dist.init_process_group("gloo", init_method="file://" + {rendezvous!r}, rank=rank,
                        world_size=world)
torch.manual_seed(5)
plain = model = Net()
if {kind!r} == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh, ignored_params={{model.scale}})
large = [p for p in plain.parameters() if p.ndim > 1]
small = [p for p in plain.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{{"params": large}}, {{"params": small}}], lr=0.01, foreach=False)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
share = Share(tuple(range(world))) if {kind!r} == "ddp" else None
objects = {{"model": model, "optimizer": optimizer, "rng": None, "extra.schedule": schedule,
            "extra.note": "hello"}}
items, kept = State(objects, rank=rank, share=share).capture()
save_snapshot(Path({scratch!r}) / f"own-{{rank}}", [(i.entry, i.tensor) for i in items], kept,
              rank=rank, world=world, needs=share.ranks if share else None)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
out = {{"model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=whole)}}
if rank == 0:
    torch.save(out, {scratch!r} + "/saved.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("ddp", "single"), ("fsdp", "fsdp")])
def test_what_real_ranks_capture_loads_without_us(
    tmp_path: Path, tier: Path, saved_as: str, loaded_as: str
) -> None:
    """Saved by 3 ranks through State, loaded by 2 (or 1) with plain DCP."""
    code = SAVED_BY_RANKS.format(
        tests=TESTS, world=3, kind=saved_as, scratch=str(tmp_path),
        rendezvous=str(tmp_path / "saving"),
    )  # fmt: skip
    run_ranks(code, 3)
    where = store(tier, [tmp_path / f"own-{rank}" for rank in range(3)])
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    found = load_without_us(where, tmp_path, loaded_as, 2 if loaded_as == "fsdp" else 1)
    same(found["model"], saved["model"])
    same(flat(found), flat(saved))
    asked = {"extra.schedule": {"last_epoch": -7, "_step_count": -7}, "extra.note": ""}
    reader.load_resharded(tier, 100, asked)
    assert asked == {"extra.schedule": {"last_epoch": 0, "_step_count": 1}, "extra.note": "hello"}


# ---------------------------------------------------------------- pipeline stages


def stages(tmp_path: Path, *, one_name: bool) -> list[Path]:
    """dp 2 x pp 2: two models, each divided between two ranks."""
    models = [trained(seed) for seed in (1, 2)]
    paths = []
    for rank in range(4):
        stage = rank % 2
        whole = state_of(*models[stage])
        if not one_name:
            state = whole["optimizer"]["state"]
            whole = {
                "model": {f"s{stage}.{k}": v for k, v in whole["model"].items()},
                "optimizer": {
                    "state": {f"s{stage}.{k}": v for k, v in state.items()},
                    "param_groups": [
                        {**g, "params": [f"s{stage}.{n}" for n in g["params"]]}
                        for g in whole["optimizer"]["param_groups"]
                    ],
                },
            }
        found, kept = tensors_of(whole)
        peers = (stage, stage + 2)
        paths.append(
            save_snapshot(
                tmp_path / f"own-{rank}",
                data_parallel(found, rank, peers),
                kept,
                rank=rank,
                world=4,
                mesh={"dp": 2, "pp": 2},
                needs=peers,
            )
        )
    return paths


def test_stages_of_one_name_are_kept_apart(tmp_path: Path, tier: Path) -> None:
    where = store(tier, stages(tmp_path, one_name=True))
    manifest = durable.read_manifest(where)
    renamed = {r.name: r for r in manifest.renamed}
    assert renamed["model.first.weight@1"].ranks == (1, 3)
    assert renamed["model.first.weight@1"].fqn == "model.first.weight"
    assert not any("running" in name for name in renamed)
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for stage in (0, 1):
        expected = state_of(*trained(stage + 1))["model"]
        for name in ("first.weight", "last.bias", "norm.running_var"):
            got = whole[f"model.{name}@1"] if stage else whole["model"][name]
            assert torch.equal(got, expected[name])
    for rank in range(4):
        (own, peer) = reader.load(tier, 100, rank, 4, {"dp": 2, "pp": 2})
        expected = state_of(*trained(rank % 2 + 1))["model"]["first.weight"]
        lower, upper = sorted((own, peer), key=lambda each: each.snapshot.rank)
        got = [each.tensors["model.first.weight"] for each in (lower, upper)]
        assert torch.equal(torch.cat(got), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stages_of_their_own_names_load_as_torch_flattens_them(tmp_path: Path, tier: Path) -> None:
    where = store(tier, stages(tmp_path, one_name=False))
    for stage in (0, 1):
        expected = state_of(*trained(stage + 1))
        asked = {
            "model": {f"s{stage}.{n}": torch.zeros_like(t) for n, t in expected["model"].items()},
            "optimizer": {
                f"state.s{stage}.first.weight.exp_avg": torch.zeros(10, 6),
                f"param_groups.s{stage}.first.weight.lr": 0.0,
                f"param_groups.s{stage}.scale.weight_decay": 7.0,
            },
        }
        torch.distributed.checkpoint.load(asked, checkpoint_id=where, no_dist=True)
        for name, tensor in expected["model"].items():
            assert torch.equal(asked["model"][f"s{stage}.{name}"], tensor)
        moments = expected["optimizer"]["state"]["first.weight"]["exp_avg"]
        got = asked["optimizer"]
        assert torch.equal(got[f"state.s{stage}.first.weight.exp_avg"], moments)
        assert got[f"param_groups.s{stage}.first.weight.lr"] == 0.01 + (stage + 1) / 1000
        assert got[f"param_groups.s{stage}.scale.weight_decay"] == 0.0


def test_blocks_in_two_dimensions(tmp_path: Path, tier: Path) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    paths = []
    for rank in range(4):
        half = whole[:, rank % 2 * 4 : rank % 2 * 4 + 4]
        entry, block = rows("model.w", half, rank // 2 * 3, rank // 2 * 3 + 3, "block")
        entry = entry._replace(global_shape=(6, 8), offsets=(rank // 2 * 3, rank % 2 * 4))
        paths.append(
            save_snapshot(tmp_path / f"own-{rank}", [(entry, block)], {}, rank=rank, world=4)
        )
    where = store(tier, paths)
    asked = {"model": {"w": torch.zeros(6, 8)}}
    reader.load_resharded(tier, 100, asked)
    assert torch.equal(asked["model"]["w"], whole)
    export(where, tmp_path / "x.safetensors")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.w"], whole)


# ---------------------------------------------------------------- export


def test_export_as_safetensors(tmp_path: Path, tier: Path, state: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    where = store(tier, save_world(tmp_path, state, 3, data_parallel))
    out = tmp_path / "all.safetensors"
    done = export(where, out)
    found = load_file(out)
    assert done == (len(found), 0, out.stat().st_size)
    expected = {**flat(state), "rng.torch": torch.arange(16, dtype=torch.uint8)}
    same(dict(sorted(found.items())), dict(sorted(expected.items())))
    export(where, tmp_path / "model.safetensors", "model")
    same(dict(sorted(load_file(tmp_path / "model.safetensors").items())),
         dict(sorted(state["model"].items())))  # fmt: skip
    assert not list(tmp_path.glob(".*tmp"))


def test_export_as_pt(tmp_path: Path, tier: Path, state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, state, 2, sharded))
    export(where, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    same(flat(whole), flat(state))
    assert whole["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    export(where, tmp_path / "model.pt", "model")
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    same(dict(model.state_dict()), state["model"])
    with pytest.raises(DurableError, match="no tensors under 'modle'"):
        export(where, tmp_path / "x.pt", "modle")
