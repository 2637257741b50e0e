"""Snapshot files of small models, as the ranks of a run would have made them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from robust_slurm.checkpoint.capture import values
from robust_slurm.checkpoint.format.dtypes import NAME, view
from robust_slurm.checkpoint.format.layout import Entry, Snapshot, encode_header, lay_out

Piece = tuple[Entry, torch.Tensor]


class Net(nn.Module):
    """Parameters of several shapes, a scalar among them, and buffers."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.scale


def trained(seed: int = 0, width: int = 10, steps: int = 3) -> tuple[Net, torch.optim.AdamW]:
    """A model and an optimizer that have done some steps."""
    torch.manual_seed(seed)
    model = Net(width)
    large = [p for p in model.parameters() if p.ndim > 1]
    small = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": large}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 + seed / 1000, betas=(0.8, 0.95))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """model and optimizer with names for parameters, as torch's get_optimizer_state_dict has it."""
    names = {id(p): n for n, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    raw = optimizer.state_dict()
    groups = [{**g, "params": [order[i] for i in g["params"]]} for g in raw["param_groups"]]
    state = {order[i]: entries for i, entries in raw["state"].items()}
    return {
        "model": dict(model.state_dict()),
        "optimizer": {"state": state, "param_groups": groups},
    }


def tensors_of(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors by fqn, and the values that refer to them."""
    found: dict[str, torch.Tensor] = {}

    def save(path: str, tensor: torch.Tensor) -> Any:
        found[path] = tensor.detach()
        return values.encode_ref(values.TensorRef(path))

    return found, {key: values.encode(value, key, save) for key, value in state.items()}


def private(fqn: str, tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    name = NAME[tensor.dtype]
    return Entry(fqn, name, shape, fqn, shape, (0,) * len(shape), "private"), tensor


def rows(fqn: str, tensor: torch.Tensor, begin: int, end: int, kind: str) -> Piece:
    """The block of some rows of a tensor."""
    block = tensor[begin:end].contiguous()
    offsets = (begin, *(0,) * (tensor.ndim - 1))
    whole = tuple(tensor.shape)
    return Entry(fqn, NAME[tensor.dtype], tuple(block.shape), fqn, whole, offsets, kind), block


def is_shared(fqn: str) -> bool:
    return not any(part in fqn for part in ("running_", "num_batches", "rng.", "loader."))


def data_parallel(
    found: Mapping[str, torch.Tensor], rank: int, ranks: Sequence[int]
) -> list[Piece]:
    """A rank's part of what data-parallel peers share: tensors in row blocks, scalars in turn."""
    pieces, at = [], list(ranks).index(rank)
    for number, (fqn, tensor) in enumerate(found.items()):
        if not is_shared(fqn):
            pieces.append(private(fqn, tensor))
        elif tensor.ndim and tensor.shape[0] >= len(ranks):
            size, of = tensor.shape[0], len(ranks)
            begin, end = size * at // of, size * (at + 1) // of
            pieces.append(rows(fqn, tensor, begin, end, "shared"))
        elif number % len(ranks) == at:
            entry, whole = private(fqn, tensor)
            pieces.append((entry._replace(kind="shared"), whole))
    return pieces


def sharded(found: Mapping[str, torch.Tensor], rank: int, world: int) -> list[Piece]:
    """A rank's shards, as fully_shard cuts them; some are empty."""
    pieces = []
    for fqn, tensor in found.items():
        if not is_shared(fqn) or not tensor.ndim:
            pieces.append(private(fqn, tensor))
            continue
        each = -(-tensor.shape[0] // world)
        begin = min(rank * each, tensor.shape[0])
        end = min(begin + each, tensor.shape[0])
        pieces.append(rows(fqn, tensor, begin, end, "block"))
    return pieces


def save_snapshot(
    path: Path,
    pieces: Sequence[Piece],
    kept: Any,
    *,
    step: int = 100,
    rank: int = 0,
    world: int = 1,
    mesh: Mapping[str, int] | None = None,
    needs: Sequence[int] | None = None,
    epoch: int = 0,
) -> Path:
    """Write a snapshot file as a rank does."""
    plan = lay_out([entry for entry, _ in pieces], 4096)
    by_name = {entry.name: tensor for entry, tensor in pieces}
    snapshot = Snapshot(
        step, rank, world, epoch, "77", dict(mesh or {}),
        tuple([rank] if needs is None else needs), kept, plan.entries,
    )  # fmt: skip
    header = encode_header(snapshot)
    plan = lay_out(plan.entries, len(header))
    with open(path, "wb+") as file:
        file.truncate(plan.size)
        with mmap.mmap(file.fileno(), plan.size) as memory:
            for entry, offset in zip(plan.entries, plan.offsets, strict=True):
                target = view(memory, offset, entry)
                target.copy_(by_name[entry.name])
                del target
            memory[8 : 8 + plan.header_size] = header.ljust(plan.header_size)
            memory[:8] = plan.header_size.to_bytes(8, "little")
    return path


def save_world(
    directory: Path,
    state: Mapping[str, Any],
    world: int,
    cut: Callable[..., list[Piece]],
    *,
    step: int = 100,
    epoch: int = 0,
) -> list[Path]:
    """One snapshot file for each rank of a data-parallel or a sharded run."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(world):
        mine = {
            **state,
            "rng": {"torch": torch.arange(16, dtype=torch.uint8) + rank},
            "loader": {"position": 7 + rank, "seed": [1, 2]},
        }
        found, kept = tensors_of(mine)
        shared = cut is data_parallel
        pieces = cut(found, rank, range(world) if shared else world)
        paths.append(
            save_snapshot(
                directory / f"own-{rank}-0.safetensors",
                pieces,
                kept,
                step=step,
                rank=rank,
                world=world,
                needs=range(world) if shared else None,
                epoch=epoch,
            )
        )
    return paths
