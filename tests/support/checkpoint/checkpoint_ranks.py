"""One rank of a gloo world that saves and restores; run by test_checkpoint_state_distributed.

Arguments: rank, world, directory. Writes what each case came to into ``result-<rank>.json``.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_files import capture, restore, scribble, source, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

from robust_slurm.checkpoint.capture.state import Share, State, StateError

RANK, WORLD, DIRECTORY = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5)  # 5 rows do not divide by two
        self.norm = nn.LayerNorm(5)
        self.second = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.2))
        self.last = nn.Linear(3, 1)  # one row: the second rank's shard is empty
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.last(self.second(self.norm(self.first(x)).relu()))
        return y


def train(objects: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        objects["optimizer"].zero_grad()
        loss = objects["model"](torch.randn(4, 6)).square().mean()
        loss.backward()
        objects["optimizer"].step()
        losses.append(float(loss.detach()))
    return losses


def files(case: str, objects: dict[str, Any], share: Share | None) -> list[Path]:
    """Every rank's snapshot, complete on all ranks."""
    items, values = State(objects, rank=RANK, share=share).capture()
    write(DIRECTORY / f"{case}-{RANK}", items, values, rank=RANK, world=WORLD)
    dist.barrier()
    return [DIRECTORY / f"{case}-{rank}" for rank in range(WORLD)]


def plain(objects: dict[str, Any]) -> list[torch.Tensor]:
    """All parameters and optimizer state that this rank holds, copied."""
    found = [*objects["model"].parameters(), *objects["model"].buffers()]
    for parameter in objects["model"].parameters():
        state = objects["optimizer"].state[parameter]
        found += [state[key] for key in sorted(state)]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in found]


def goes_on_exactly(case: str, make: Any, share: Share | None) -> None:
    torch.manual_seed(10 + RANK)
    first = make(0)
    train(first, 2)
    paths = files(case, first, share)
    then = plain(first)
    expected = train(first, 2)
    second = make(1)  # its optimizer has no state yet
    own = paths if share else [paths[RANK]]
    restore(second, [source(path) for path in own], rank=RANK)
    dist.barrier()
    if RANK == 0:
        for path in paths:
            scribble(path)
    dist.barrier()
    now = plain(second)
    assert len(now) == len(then) and all(map(torch.equal, now, then))
    assert train(second, 2) == expected
    assert all(map(torch.equal, plain(second), plain(first)))


def ddp(seed: int) -> dict[str, Any]:
    model = DistributedDataParallel(Net(seed))
    model(torch.zeros(4, 6)).sum().backward()  # DDP orders what it adds up after its first step
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "rng": None}


def case_ddp_alone() -> None:
    goes_on_exactly("ddp_alone", ddp, None)


def case_ddp_shared() -> None:
    goes_on_exactly("ddp_shared", ddp, Share((0, 1)))


def case_ddp_names_and_checksum() -> None:
    objects = ddp(0)
    train(objects, 1)
    state = State(objects, rank=RANK, share=Share((0, 1)))
    crcs: list[Any] = [None] * WORLD
    dist.all_gather_object(crcs, state.shared_crc())
    assert crcs[0] == crcs[1] != 0
    items, _ = state.capture()
    held = sum(i.entry.nbytes for i in items if i.entry.kind == "shared")
    parts: list[Any] = [None] * WORLD
    dist.all_gather_object(parts, (held, sorted(i.entry.fqn for i in items)))
    whole = sum(i.entry.nbytes for i in capture(objects, rank=RANK)[0] if "shared" in i.entry.kind)
    assert whole == 0
    assert abs(parts[0][0] - parts[1][0]) <= 64
    names = {name for part in parts for name in part[1]}
    assert {"model.first.weight", "optimizer.state.last.bias.exp_avg", "model.calls"} <= names
    assert not any("module" in name for name in names)
    with torch.no_grad():
        objects["model"].module.last.bias += RANK
    dist.all_gather_object(crcs, state.shared_crc())
    assert crcs[0] != crcs[1]


def case_ddp_ignored_parameters_are_not_shared() -> None:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["last.weight"])
    model = nn.Sequential(DistributedDataParallel(net))
    items, _ = State({"model": model}, rank=RANK, share=Share((0, 1))).capture()
    kinds = {i.entry.fqn: i.entry.kind for i in items}
    assert kinds["model.0.last.weight"] == "private"
    assert "model.0.calls" in kinds


def fsdp(seed: int, **options: Any) -> dict[str, Any]:
    model = Net(seed)
    for part in (model.first, model.second[0]):
        fully_shard(part, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "rng": None}


def case_fsdp() -> None:
    goes_on_exactly("fsdp", fsdp, None)


def case_fsdp_beside_a_share() -> None:
    """Blocks are never shared, what is whole on every rank is."""
    goes_on_exactly("fsdp_share", fsdp, Share((0, 1)))


def case_fsdp_offloaded() -> None:
    goes_on_exactly(
        "fsdp_offload", lambda seed: fsdp(seed, offload_policy=CPUOffloadPolicy(False)), None
    )


def case_fsdp_blocks_make_up_the_whole() -> None:
    objects = fsdp(0)
    train(objects, 1)
    opened = [source(path) for path in files("blocks", objects, None)]
    whole = {f"model.{k}": p.full_tensor() for k, p in objects["model"].named_parameters()}
    for name, parameter in objects["model"].named_parameters():
        average = objects["optimizer"].state[parameter]["exp_avg"]
        whole[f"optimizer.state.{name}.exp_avg"] = average.full_tensor()
    for name, truth in whole.items():
        built = torch.full_like(truth, float("nan"))
        for part in opened:
            entry = next(e for e in part.snapshot.entries if e.fqn == name)
            assert entry.kind == "block" and entry.global_shape == tuple(truth.shape)
            at = tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.shape, strict=True))
            built[at] = part.tensors[name]
        assert built.equal(truth), name


def case_fsdp_is_resharded_first() -> None:
    """After a forward alone the root's parameters are whole; the shards are what is saved."""
    objects = fsdp(0)
    state = State(objects, rank=RANK)
    train(objects, 1)
    before, _ = state.capture()
    with torch.no_grad():
        objects["model"](torch.zeros(4, 6))
    assert not isinstance(objects["model"].last.weight, DTensor)
    after, _ = state.capture()
    assert [i.entry for i in before if i.late] == [i.entry for i in after if i.late]
    with torch.no_grad():
        objects["model"](torch.zeros(4, 6))
    path = files("reshard", objects, None)[RANK]
    restore(objects, [source(path)], rank=RANK)
    train(objects, 1)


def case_fsdp_saved_otherwise_is_refused() -> None:
    path = files("refused", ddp(0), None)[RANK]
    try:
        restore(fsdp(0), [source(path)], rank=RANK)
    except StateError as err:
        assert "model.first.weight: saved as a whole tensor, it is S0 on a mesh of 2" in str(err)
    else:
        raise AssertionError("restored")


def case_dtensors() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))

    class Parts(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            whole = torch.randn(4, 6)
            self.columns = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
            self.everywhere = nn.Parameter(distribute_tensor(whole + 1, mesh, [Replicate()]))
            local = torch.randn(3) + RANK
            self.register_buffer("sums", DTensor.from_local(local, mesh, [Partial()]))

    first, second = Parts(0), Parts(1)
    share = Share((0, 1))
    items, _ = State({"model": first}, rank=RANK, share=share).capture()
    kinds = {i.entry.fqn: i.entry.kind for i in items}
    assert kinds.pop("model.everywhere", "shared") == "shared"
    assert kinds == {"model.columns": "block", "model.sums": "private"}
    columns = next(i.entry for i in items if i.entry.fqn == "model.columns")
    assert columns.offsets == (0, 3 * RANK) and columns.shape == (4, 3)
    paths = files("dtensors", {"model": first}, share)
    restore({"model": second}, [source(path) for path in paths], rank=RANK)
    for here, there in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert here.to_local().equal(there.to_local())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{DIRECTORY}/store", rank=RANK, world_size=WORLD
    )
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                case()
                results[name] = "ok"
            except Exception:  # noqa: BLE001 - the test shows it
                results[name] = traceback.format_exc()
                break  # the other rank waits elsewhere now
    (DIRECTORY / f"result-{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    os._exit(0)  # programs/teardown.py says why


if __name__ == "__main__":
    main()
