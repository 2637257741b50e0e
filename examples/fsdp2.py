"""A plain training loop with FSDP2 that goes on where it was stopped; see fsdp2.sbatch.

With ``--robust-min-nodes`` also on fewer nodes, with the same batch: ``world`` and ``accumulate``.

torchrun --nproc-per-node=2 examples/fsdp2.py --out runs/fsdp2
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's 2,000 modules are no garbage; unsearched they load in 3/4 of the time

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import robust_slurm

WIDTH = 64


def batch_of(step: int, share: int, device: torch.device) -> Tensor:
    """A batch (8, WIDTH) that follows from step and share: nothing of it needs to be saved."""
    own = torch.Generator().manual_seed(1_000_003 * step + share)
    return torch.randn(8, WIDTH, generator=own).to(device)


def train(out: Path, steps: int, device: torch.device) -> None:
    whole = robust_slurm.world()  # a rank of a smaller world has several shares of the batch
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    checkpointer = robust_slurm.Checkpointer(
        model=model, optimizer=optimizer, extra={"schedule": schedule}, mesh=mesh,
        directory=out / "checkpoints",
    )  # fmt: skip
    gc.freeze()  # all modules are loaded: never search them, also not at the exit
    gc.enable()
    for step in range(checkpointer.resume() + 1, steps + 1):
        optimizer.zero_grad()
        for share in robust_slurm.accumulate(model):
            # None: another rank has one share more, and its passes need all ranks; scale is 0.
            inputs = batch_of(step, share or 0, device)
            loss = (model(inputs) - inputs).square().mean()
            torch.autograd.backward(loss * whole.scale)
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
        checkpointer.save(step)  # last: what changes after it is not in this step
    checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory on shared storage")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step [100]")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args.out, args.steps, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
