"""Train a small language model with torch DDP, in a way that survives being stopped at any time.

A byte-level transformer learns a play of Shakespeare's: on CPUs with gloo, with a GPU per rank
with NCCL. It runs under robust-srun, srun and torchrun, or alone:

    python examples/train_lm.py --out runs/lm --steps 100

Stopped at any step and started again with the same ``--out``, it goes on after its newest
checkpoint and ends with exactly the losses of a run that was never stopped. What that takes:

- model and optimizer are in a ``robust_slurm.Checkpointer``: under robust-srun every step is kept
  in the memory of two nodes, everywhere some go to disk;
- a step's data follow from the seed and the step's number, not from what was read before; with
  ``--plan speeches:plan`` they come from ``robust_slurm.data``, whose position is saved;
- under ``--robust-min-nodes`` the whole batch stays as it is when a node is missing: the ranks
  compute the missing one's share of it, one after the other (``accumulate``);
- what the ranks add up, they add up in the same order every time (see ``settle``).

Files in ``--out``: ``checkpoints/``, and ``loss.jsonl`` with one line per step.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's 2,000 modules are no garbage; unsearched they load in 3/4 of the time

import argparse
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import robust_slurm
from robust_slurm import data

VOCABULARY = 256  # bytes


def main() -> None:
    args = parse_args()
    rank, world, device = join_world()
    train(args, rank, world, device)
    dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    text = load_text(args.data, args.context).to(device)
    torch.manual_seed(args.seed)
    bare = Transformer(args.context, args.width, args.layers, args.heads).to(device)
    model = DistributedDataParallel(bare, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    whole = robust_slurm.world()  # with --robust-min-nodes a rank may have several shares
    settle(model, *batch_of(text, args, 0, rank, world))
    loader = data.Loader(args.plan) if args.plan else None
    checkpointer = robust_slurm.Checkpointer(
        model=model,
        optimizer=optimizer,
        loader=loader,
        directory=args.out / "checkpoints",
        every=args.save_every,
    )
    gc.freeze()  # all modules are loaded: never search them, also not at the exit
    gc.enable()
    done = checkpointer.resume()
    losses = LossFile(args.out / "loss.jsonl", done) if rank == 0 else None
    if losses is not None:
        print(why_here(done), flush=True)

    for step in range(done + 1, args.steps + 1):
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step, args.steps)
        optimizer.zero_grad(set_to_none=True)
        mean = torch.zeros((), device=device)
        for share in robust_slurm.accumulate(model):
            if loader is not None:
                inputs, targets = targets_of(next(loader), device)
            else:
                inputs, targets = batch_of(text, args, step, share, whole.original)
            loss = loss_of(model, inputs, targets)
            torch.autograd.backward(loss * whole.scale)
            mean += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        time.sleep(max(0.0, began + args.step_time - time.monotonic()))

        dist.all_reduce(mean)
        mean_loss = mean.item() / whole.original
        robust_slurm.beat(step, loss=mean_loss, grad_norm=norm.item())
        if losses is not None:
            losses.add(step, mean_loss)  # before the step is saved: no saved step is without it
            print(f"step {step} loss {mean_loss:.6f}", flush=True)
        checkpointer.save(step)
    checkpointer.close()  # when the last step is on disk


# -- the model --------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, both with a residual path around them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        change: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))
        return x + change


class Transformer(nn.Module):
    """Bytes (batch, length) -> logits of the byte after each (batch, length, VOCABULARY)."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))
        return logits


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a warm-up of 10 steps, then a cosine to a tenth."""
    if step <= 10:
        return step / 10
    return 0.55 + 0.45 * math.cos(math.pi * (step - 10) / max(1, steps - 10))


def settle(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """One pass forward and back that changes nothing but DDP's own plan.

    DDP sorts the gradients into buckets anew after its first backward pass, and the place of a
    number in its bucket decides in which order the ranks' values are added. Without this pass the
    first step of every start adds in another order than the same step of a run that was not
    stopped. It matters where layers are not registered in the order of their use: with `head`
    registered first, losses differed by 3e-7 after a resume on 3 ranks; with this pass, by 0.
    """
    torch.autograd.backward(loss_of(model, inputs, targets))
    model.zero_grad(set_to_none=True)


# -- the data ---------------------------------------------------------------------------------


def load_text(path: Path, context: int) -> Tensor:
    raw = path.read_bytes()
    if len(raw) < 2 * context:
        sys.exit(f"{path}: {len(raw)} bytes are too few for a context of {context}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def batch_of(
    text: Tensor, args: argparse.Namespace, step: int, share: int, shares: int
) -> tuple[Tensor, Tensor]:
    """One of the shares of a step's batch: inputs and targets, each (batch, context).

    The whole batch is drawn from a generator of the step's own, so nothing needs to be saved, and
    how it is divided does not change what is in it.
    """
    own = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.context, (shares * args.batch,), generator=own)
    mine = starts[share * args.batch : (share + 1) * args.batch].to(text.device)
    windows = text[mine[:, None] + torch.arange(args.context + 1, device=text.device)]
    return windows[:, :-1], windows[:, 1:]


def targets_of(batch: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a loader's batch of packed rows. No token has to foretell the
    first one of another document, or padding: -100 is what cross_entropy leaves out."""
    tokens, documents = batch["tokens"].to(device).long(), batch["document_ids"].to(device)
    other = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(other, -100)


# -- the losses -------------------------------------------------------------------------------


class LossFile:
    """The losses by step, one JSON object per line; one curve, however often it is resumed."""

    def __init__(self, path: Path, done: int) -> None:
        """Drop what is there of later steps than `done`: they will be done again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if 0 < _step_of(line) <= done]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a")
        self._epoch = int(os.environ.get("ROBUST_EPOCH", "0"))

    def add(self, step: int, loss: float) -> None:
        line = {"step": step, "loss": loss, "epoch": self._epoch, "time": time.time()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _step_of(line: str) -> int:
    """The step of a line of the loss file; 0 for a line that was torn by a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


# -- the world --------------------------------------------------------------------------------


def join_world() -> tuple[int, int, torch.device]:
    """Join the process group; return rank, world size and device.

    robust-srun and torchrun set RANK and the others; srun alone sets SLURM_PROCID and its kin.
    """
    env = os.environ
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    world = int(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or 1)
    local = int(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID") or 0)
    hosts = env.get("SLURM_STEP_NODELIST") or "localhost"
    env.setdefault("MASTER_ADDR", first_host(hosts))
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID") or 0) % 10000))
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums are not repeatable
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    return rank, world, device


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: ``n[3-5,9],m1`` -> ``n3``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", hosts)
    return found[1] + (found[2] or "") if found else hosts


def why_here(done: int) -> str:
    """Return a line for the log on the start or restart of the training."""
    where = f"resumed after step {done}" if done else "starting at step 1"
    epoch, reason = os.environ.get("ROBUST_EPOCH"), os.environ.get("ROBUST_RESTART_REASON")
    if not epoch:
        return where
    return f"{where} (epoch {epoch}{', restarted: ' + reason if reason else ''})"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent

    def option(name: str, default: Any, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} [%(default)s]")

    parser.add_argument("--out", type=Path, required=True, help="directory on shared storage")
    parser.add_argument("--data", type=Path, default=here / "data" / "coriolanus.txt", help="text")
    text = "take batches of --context + 1 tokens from this plan of robust_slurm.data, MODULE:NAME;"
    option("--plan", "", f"{text} --data and --batch count for nothing then")
    option("--steps", 100, "train up to this step")
    option("--save-every", 10, "steps between checkpoints on disk")
    option("--batch", 8, "sequences per rank and step")
    option("--context", 64, "bytes per sequence")
    option("--layers", 2, "transformer blocks")
    option("--width", 64, "width of the model, a multiple of --heads")
    option("--heads", 4, "attention heads")
    option("--lr", 3e-3, "learning rate")
    option("--seed", 1, "of the weights and the data")
    option("--step-time", 0.0, "seconds of a step at least; it waits, as for an accelerator")
    return parser.parse_args()


if __name__ == "__main__":
    main()
