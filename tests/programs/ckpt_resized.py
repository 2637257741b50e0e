"""A training that keeps its global batch in worlds of any size: a loader for each share of it, and
one of robust_slurm.data, of a plan without a mesh, for all shares.

DDP, or with ``--cut=fsdp`` and ``--cut=hsdp`` (2 shards) parameters in blocks of ``fully_shard``,
or with ``--pipeline`` replicas of two stages whose parameters have the same names and shapes.

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

args = options("before", "original", "from", "cut", "pipeline")
rank, size = join_world()
if args.original:
    os.environ["ROBUST_RESIZED"] = f"{args.original}:{size}"
    os.environ["ROBUST_REPLICA_RANKS"] = args.pipeline or "1"
mesh: Any = None
stage, last = 0, True
if args.pipeline:  # stage by stage, as torchtitan and Megatron number them
    mesh = {"pp": 2, "dp": size // 2}
    stage, replica = divmod(rank, size // 2)
    last = stage == 1
whole = robust_slurm.world(mesh)
seed(1 + stage)
net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
model: nn.Module = net
if args.pipeline:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    stages = [range(first, first + size // 2) for first in (0, size // 2)]
    groups = [dist.new_group(list(ranks)) for ranks in stages]
    model = DistributedDataParallel(net, process_group=groups[stage])
    model(torch.zeros(2, WIDTH)).sum().backward()
    model.zero_grad(set_to_none=True)
elif args.cut:
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
planned = data.Loader("data_plan:of_pipelines" if args.pipeline else "data_plan:without_mesh")


class ShareLoader:
    """A share's own loader, and the position of the plan's, which is that of all shares."""

    def __init__(self, share: int) -> None:
        self.own: Any = StatefulDataLoader(
            Samples(),
            batch_size=BATCH,
            sampler=DistributedSampler(
                Samples(), num_replicas=whole.share_count, rank=share, shuffle=True, seed=5
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
    return f"{stage}:{total:08x}"


def forward_and_back(inputs: Tensor, targets: Tensor) -> Tensor:
    """All of a share's batch through the model, or through both stages; the loss, in the last."""
    if args.pipeline and not last:
        hidden = model(inputs)
        dist.send(hidden.detach(), rank + size // 2)
        slope = torch.empty_like(hidden)
        dist.recv(slope, rank + size // 2)
        hidden.backward(slope)
        return torch.zeros(())
    if args.pipeline:
        inputs = torch.empty_like(inputs)
        dist.recv(inputs, rank - size // 2)
        inputs.requires_grad_()
    loss = (model(inputs).sum(1, keepdim=True) - targets).square().mean()
    (loss * whole.scale).backward()
    if inputs.grad is not None:
        dist.send(inputs.grad, rank - size // 2)
    return loss.detach()


ckpt = None
begun = int(getattr(args, "from") or 0)
if not args.bare:
    ckpt = robust_slurm.Checkpointer(
        model=model,
        optimizer=optimizer,
        loader=loaders,
        directory=args.directory,
        mesh=mesh,
    )
    begun = ckpt.resume()
elif args.before:
    for parameter in net.parameters():  # so that there is optimizer state
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept = torch.load(Path(args.before) / f"state-{stage}.pt")
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
    for share in robust_slurm.accumulate(model, mesh):
        if share is None:  # another rank has one share more, and its passes need all ranks
            (model(inputs).sum() * whole.scale).backward()
            continue
        ids, inputs, targets = next(batches[share])
        tokens = next(planned)["tokens"]
        more = tokens.reshape(-1, WIDTH).float().sin()
        inputs = torch.cat([inputs, more])
        targets = torch.cat([targets, more.sum(1, keepdim=True)])
        mean += forward_and_back(inputs, targets)
        if last:
            seen[share] = ids.tolist()
            rows[share] = zlib.crc32(tokens.numpy().tobytes())
    optimizer.step()
    # A test ends the run by a file: all ranks see it after the same step.
    both = torch.stack([mean, torch.tensor(float((args.dir / "enough").exists()))])
    dist.all_reduce(both)
    mean, enough = both[0], bool(both[1])
    state = state_sum()
    found = (mean / whole.share_count).item()
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
    for share, loader in loaders.items() if last else ():
        torch.save(loader.state_dict(), args.dir / f"loader-{share}.pt")
    kept = [tensor.detach().clone() for tensor in whole_tensors()]
    if rank == stage * (size // 2):
        torch.save(kept, args.dir / f"state-{stage}.pt")
if ckpt is not None:
    ckpt.close()
journal.write(end=True)
dist.barrier()
dist.destroy_process_group()
leave()
