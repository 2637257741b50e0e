"""A training that keeps its global batch in worlds of any size: a loader for each share of it, and
one of robust_slurm.data, of a plan without a mesh, for all shares.

DDP, or with ``--cut=fsdp`` and ``--cut=hsdp`` (2 shards) parameters in blocks of ``fully_shard``.

Without robust-srun (``--bare``) a run goes on from what the run before it left in ``--before``, in
a world of another size: the same change of the world, made without a fault.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if "--cut=" in " ".join(sys.argv):
    import torch._dynamo  # DTensors need the compiler that without_compiler.py would keep out
from ckpt_training import (
    BATCH,
    HOLD,
    WIDTH,
    Journal,
    Samples,
    join_world,
    options,
    seed,
)
from teardown import leave
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import robust_slurm
from robust_slurm import data

args = options("before", "original", "from", "cut")
rank, size = join_world()
if args.original:
    os.environ["ROBUST_RESIZED"] = f"{args.original}:{size}"
whole = robust_slurm.world()
seed(1)
net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
model: nn.Module = net
if args.cut:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sizes = {"fsdp": size} if args.cut == "fsdp" else {"dp_replicate": size // 2, "dp_shard": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for part in net:
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
else:
    model = DistributedDataParallel(net)
    model(torch.zeros(2, WIDTH)).sum().backward()  # DDP orders its buckets anew after this one
    model.zero_grad(set_to_none=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sys.path.append(str(Path(__file__).parents[1] / "support" / "data"))
planned = data.Loader("data_plan:without_mesh")


class ShareLoader:
    """A share's own loader, and the position of the plan's, which is that of all shares."""

    def __init__(self, share: int) -> None:
        self.own: Any = StatefulDataLoader(
            Samples(),
            batch_size=BATCH,
            sampler=DistributedSampler(
                Samples(), num_replicas=whole.original, rank=share, shuffle=True, seed=5
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.state_dict(), "plan": planned.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state["own"])
        planned.load_state_dict(state["plan"])


loaders = {share: ShareLoader(share) for share in whole.shares}
journal = Journal(args, rank)


def parameters_and_state() -> list[Tensor]:
    found: list[Tensor] = [*net.parameters()]
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        found += [value for _, value in sorted(state.items())]
    return found


def whole_tensors() -> list[Tensor]:
    """Parameters and optimizer state, what is equal on all ranks; blocks are put together."""
    found: list[Any] = parameters_and_state()
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


def state_sum() -> str:
    total = 0
    for tensor in whole_tensors():
        tensor = tensor.detach()
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
    return f"{total:08x}"


ckpt = None
begun = int(getattr(args, "from") or 0)
if not args.bare:
    ckpt = robust_slurm.Checkpointer(
        model=model,
        optimizer=optimizer,
        loader=loaders,
        directory=args.directory,
        mesh=mesh if args.cut else None,
    )
    begun = ckpt.resume()
elif args.before:
    for parameter in net.parameters():  # so that there is optimizer state
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept = torch.load(Path(args.before) / "state.pt")
    for tensor, saved in zip(parameters_and_state(), kept, strict=True):
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            saved = distribute_tensor(saved, tensor.device_mesh, tensor.placements)
        tensor.detach().copy_(saved)
    for share, loader in loaders.items():
        loader.load_state_dict(torch.load(Path(args.before) / f"loader-{share}.pt"))
journal.write(resumed=begun, size=whole.size, state=state_sum())


def endless(share: int) -> Any:
    while True:
        yield from loaders[share].own


batches = {share: endless(share) for share in whole.shares}
inputs = torch.zeros(BATCH, WIDTH)
for step in range(begun + 1, args.steps + 1):
    held = args.dir / f"held.{journal.epoch}.{step}.{rank}"
    if f"{journal.epoch}:{step}" in args.hold.split(",") and not held.exists():
        held.touch()
        time.sleep(HOLD)
    optimizer.zero_grad(set_to_none=True)
    mean, seen, rows = torch.zeros(()), {}, {}
    for share in robust_slurm.accumulate(model):
        if share is None:  # another rank has one share more, and its passes need all ranks
            (model(inputs).sum() * whole.scale).backward()
            continue
        ids, inputs, targets = next(batches[share])
        tokens = next(planned)["tokens"]
        more = tokens.reshape(-1, WIDTH).float().sin()
        inputs = torch.cat([inputs, more])
        targets = torch.cat([targets, more.sum(1, keepdim=True)])
        loss = (model(inputs) - targets).square().mean()
        (loss * whole.scale).backward()
        mean += loss.detach()
        seen[share] = ids.tolist()
        rows[share] = zlib.crc32(tokens.numpy().tobytes())
    optimizer.step()
    # A test ends the run by a file: all ranks see it after the same step.
    both = torch.stack([mean, torch.tensor(float((args.dir / "enough").exists()))])
    dist.all_reduce(both)
    mean, enough = both[0], bool(both[1])
    state = state_sum()
    found = (mean / whole.original).item()
    same = {"state": state, "size": whole.size}
    journal.write(step=step, loss=found.hex(), ids=seen, rows=rows, **same)
    robust_slurm.beat(step, loss=found)
    time.sleep(args.pause)
    if ckpt is not None:
        ckpt.save(step)
    journal.write(saved=step)
    if enough:
        break
if args.bare:
    for share, loader in loaders.items():
        torch.save(loader.state_dict(), args.dir / f"loader-{share}.pt")
    kept = [tensor.detach().clone() for tensor in whole_tensors()]
    if rank == 0:
        torch.save(kept, args.dir / "state.pt")
if ckpt is not None:
    ckpt.close()
journal.write(end=True)
dist.barrier()
dist.destroy_process_group()
leave()
