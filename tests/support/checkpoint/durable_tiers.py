"""Committed steps in a durable tier, and whether what comes back is what went in."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from durable_snapshots import private, save_snapshot, tensors_of

from robust_slurm.checkpoint.capture.state import State
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.commit import CommitRequest, CommitResult, commit
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.durable.verify import verify
from robust_slurm.checkpoint.training.mesh import RankIds
from robust_slurm.checkpoint.training.resuming import reshard
from robust_slurm.resizing.world import TrainingWorld

RUN = "77.e0"
"""The attempt that writes, where a test does not say otherwise."""


def store(tier: Path, sources: Sequence[Path], step: int = 100) -> Path:
    """Write and commit the snapshots of all ranks. Returns the step's directory."""
    for source in sources:
        write(str(source), tier, RUN)
    commit_now(tier, step, len(sources))
    return durable.step_dir(tier, step)


def commit_now(
    tier: Path, step: int, world: int = 1, attempt: str = RUN, *, wait: float = 0, keep: int = 2
) -> CommitResult:
    return commit(CommitRequest(tier, step, world, attempt, wait, keep), threading.Event())


def tiny(path: Path, step: int, rank: int = 0, world: int = 1, fill: float = 1.0) -> Path:
    """A snapshot that takes little time to write."""
    piece = private(f"model.w{rank}", torch.full((50,), fill))
    return save_snapshot(path, [piece], {"extra.n": 3}, step=step, rank=rank, world=world)


def save(tier: Path, step: int, attempt: str = RUN, **more: Any) -> Path:
    """One committed step of one rank."""
    source = tiny(tier.parent / "own.safetensors", step, **more)
    write(str(source), tier, attempt)
    commit_now(tier, step, attempt=attempt)
    return durable.step_dir(tier, step)


def listed(tier: Path) -> list[int]:
    """Committed steps, each of them verified."""
    found = durable.committed(tier)
    for each in found:
        assert verify(each.path) == []
    return [each.step for each in found]


def flat(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of model and optimizer, by name."""
    return tensors_of({key: state[key] for key in ("model", "optimizer")})[0]


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Equal names, types and values."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


class Position:
    """A loader, as far as a Checkpointer sees it."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("it was of another rank")


def load_alone(tier: Path, objects: dict[str, Any], step: int = 100) -> list[str]:
    """Restore what any ranks saved into these objects of one process. Return what was said."""
    said = list[str]()
    world, own = RankIds(0, 1, 0, 1), TrainingWorld(0, 1, 1, {})
    reshard(State(objects, rank=0), objects, str(tier), step, world, own, said.append)
    return said
