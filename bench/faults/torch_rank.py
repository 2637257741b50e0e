"""A training of bench.faults over gloo: two pipeline stages, four replicas of each, snapshots.

Every number that ranks add up is a multiple of 2^-20, so sums do not depend on their order and an
interrupted training ends with exactly the loss of ``reference``. Rank 0 writes the wall time of
each step to ``steps`` in the directory, as the toy of bench.chaos does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.chaos.rank import among, end_by, last_step, ordered

REPLICAS, STAGES, WIDTH = 4, 2, 64
RATE = 0.125  # of learning; a power of two, as the products are then exact
FLIP, SIZE, STUCK, DEADLOCK = "flip", "size", "stuck", "deadlock"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="shared directory of this run")
    add("--steps", type=int, default=120)
    add("--step-time", type=float, default=0.05)
    add("--error", default="", choices=("", FLIP, SIZE, STUCK, DEADLOCK), help="the fault ...")
    add("--error-at", type=int, default=0, help="... at this step")
    add("--error-rank", default="", help="... on these ranks, as in 1,4")
    add("--error-node", default="", help="... on these nodes alone")
    add("--orders", action="store_true", help="do what order.RANK and last in the directory say")
    return parser.parse_args()


def batch(step: int, replica: int) -> Tensor:
    """Return the data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(WIDTH, generator=generator, dtype=torch.float64)


def exact(gradient: Tensor) -> Tensor:
    """Round, so that sums of few are exact."""
    return torch.round(gradient * 2**20) / 2**20


def turn(weight: Tensor, hidden: Tensor, data: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the second stage's gradient, what it hands back, and the loss."""
    error = weight * hidden - data.flip(0)
    slope = error / (REPLICAS * WIDTH)
    return exact(slope * hidden), slope * weight, float((error * error).sum())


def reference(steps: int) -> float:
    """Return the loss of replica 0 in the last step of an undisturbed training."""
    first, second = (torch.ones(WIDTH, dtype=torch.float64) for _ in range(STAGES))
    found = 0.0
    for step in range(steps):
        sums = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(STAGES)]
        for replica in range(REPLICAS):
            data = batch(step, replica)
            own, back, loss = turn(second, first * data, data)
            sums[0] += exact(back * data)
            sums[1] += own
            found = loss if replica == 0 else found
        first.sub_(RATE * sums[0])
        second.sub_(RATE * sums[1])
    return found


class Stage(nn.Module):
    """The parameters of one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)


class Pipeline:
    """This rank in its pipeline and among its replicas (rank = 4 x stage + replica)."""

    def __init__(self, args: argparse.Namespace, weight: Tensor) -> None:
        self.args, self.weight = args, weight
        self.rank = dist.get_rank()
        self.stage, self.replica = divmod(self.rank, REPLICAS)
        alike = [dist.new_group([REPLICAS * s + r for r in range(REPLICAS)]) for s in range(STAGES)]
        pipes = [dist.new_group([r, REPLICAS + r]) for r in range(REPLICAS)]
        self.alike, self.pipe = alike[self.stage], pipes[self.replica]

    def due(self, fault: str, step: int) -> bool:
        """True if this rank is to have this fault now; it leaves a mark."""
        args, node = self.args, os.environ.get("SLURMD_NODENAME", "")
        here = among(args.error_node, node) and among(args.error_rank, str(self.rank))
        if not here or (args.error, args.error_at) != (fault, step):
            return False
        mark = Path(args.dir) / f"failed.{self.rank}"
        again = mark.exists()
        if not again:  # its time is that of the first fault
            mark.touch()
        return fault in (SIZE, DEADLOCK) or not again

    def gradient(self, step: int) -> tuple[Tensor, float]:
        """Return the sum of the replicas' gradients, and the loss of this one."""
        data = batch(step, self.replica)
        if self.due(DEADLOCK, step + 1):
            end_by(DEADLOCK, self.args.dir)
        if self.stage == 0:
            dist.send(self.weight * data, self.rank + REPLICAS)
            back = torch.empty(WIDTH + 1, dtype=torch.float64)
            dist.recv(back, self.rank + REPLICAS)
            own, loss = exact(back[:WIDTH] * data), float(back[WIDTH])
        else:
            hidden = torch.empty(WIDTH, dtype=torch.float64)
            dist.recv(hidden, self.rank - REPLICAS)
            own, hand, loss = turn(self.weight, hidden, data)
            dist.send(
                torch.cat((hand, torch.tensor([loss], dtype=hand.dtype))), self.rank - REPLICAS
            )
        if self.due(STUCK, step + 1):  # its peer of the other stage never makes this call
            dist.all_reduce(torch.zeros(1), group=self.pipe)
        if self.due(SIZE, step + 1):
            own = own[: WIDTH // 2].clone()
        dist.all_reduce(own, group=self.alike)
        return own, loss


def main() -> None:
    """Train."""
    import robust_slurm

    args, began = parse(), time.time()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    stage = Stage()
    optimizer = torch.optim.SGD([stage.weight], lr=RATE)
    pipeline = Pipeline(args, stage.weight)
    mesh = {"pp": STAGES, "dp": REPLICAS}
    directory = args.dir / "checkpoints"
    saver = robust_slurm.Checkpointer(
        model=stage, optimizer=optimizer, mesh=mesh, directory=directory, every=10
    )
    loss, step = 0.0, saver.resume()
    node = os.environ.get("SLURMD_NODENAME", "")
    with (args.dir / "steps").open("a") as steps:
        while step < args.steps:
            time.sleep(args.step_time)
            if args.orders:
                args.steps = last_step(args.dir) or args.steps
                if error := ordered(args.dir, rank, node, step + 1, began):
                    end_by(error, args.dir)
            stage.weight.grad, loss = pipeline.gradient(step)
            optimizer.step()
            if pipeline.due(FLIP, step + 1):
                stage.weight.view(torch.int64)[7] ^= 1 << 50
            robust_slurm.beat(step + 1, loss=loss)
            if rank == 0:
                steps.write(f"{time.time():.3f} {step + 1}\n")
                steps.flush()
            step += 1
            saver.save(step)
    if rank == 0:
        (args.dir / "final.json").write_text(json.dumps([args.steps, loss]))
    dist.barrier()
    saver.close()
    sys.stdout.flush()
    os._exit(0)  # what Python takes apart at its end can hang in torch 2.13, see bench.torch_train


if __name__ == "__main__":
    main()
