"""Estimate at start the memory that the snapshots will take, and check that it is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..format.layout import SUFFIX
from ..format.sizes import megabytes
from ..store.reserve import free


def estimate(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> int:
    """Bytes of one snapshot of this rank's parameters, buffers and optimizer state.

    The state that an optimizer has not made yet is counted as Adam's or SGD's would be.
    """
    size = 0
    for model in models:
        if isinstance(model, torch.nn.Module):
            size += sum(map(_bytes, (*model.parameters(), *model.buffers())))
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            copies = (2 if "betas" in group else 0) + bool(group.get("momentum"))
            copies += bool(group.get("amsgrad"))
            size += copies * sum(map(_bytes, group["params"]))
    return size


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "to_local", None)  # of a DTensor: this rank's shard
    return (tensor if local is None else local()).nbytes


class Rung(NamedTuple):
    """Numbers of snapshots that a node keeps of each rank."""

    own: int
    extra: int
    """One more of its own while one is written to disk."""
    replicas: int
    """Replicas of another rank."""

    @property
    def files(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        return f"{self.own + self.extra} own and {self.replicas} replicas"


LADDER = (Rung(3, 1, 3), Rung(2, 1, 2), Rung(2, 0, 2), Rung(2, 0, 0), Rung(1, 0, 0))
ALONE = (Rung(1, 1, 0), Rung(1, 0, 0))  # outside robust-srun only what goes to disk is saved
_COSTS = {
    2: "each step waits until all ranks have the one before",
    0: "no node keeps replicas here, so a lost node costs the steps since the last durable one",
    1: "a fault while it is overwritten costs them as well, so not every step is saved",
}


def choose(
    room: int, size: int, ranks: int, ladder: Sequence[Rung], below: Rung | None = None
) -> tuple[Rung | None, str]:
    """The first rung for which ``room`` bytes of a node suffice, and what to tell people ("" for
    the first of all). ``size``: bytes of a snapshot of each of the node's ``ranks``. ``below``: no
    rung from this one up, for which there was no room after all. Pure."""
    needs = [rung.files * size * ranks for rung in ladder]
    first = 0 if below is None else ladder.index(below) + 1
    fit = [rung for rung, need in zip(ladder, needs, strict=True) if need <= room]
    rung = next((rung for rung in fit if rung in ladder[first:]), None)
    if rung is ladder[0]:
        return rung, ""
    head = (
        f"snapshots of about {megabytes(size)} each: {ladder[0].files} for each of the "
        f"{ranks} rank{'s' * (ranks != 1)} of this node take {megabytes(needs[0])} of /dev/shm (a "
        f"tmpfs), {megabytes(room)} are free"
    )
    if rung is None:
        return None, head
    kept = f"{head}. Kept: {rung}"
    if ladder is not LADDER:
        return rung, f"{kept}; steps are left out while one is written"
    costs = [_COSTS[rung.replicas]] + ([_COSTS[1]] if rung.own == 1 else [])
    return rung, f"{kept}: {'; '.join(costs)}. Make /dev/shm or the job's --mem larger"


def check_room(
    directory: str, size: int, below: Rung | None = None, *, local_ranks: int, replicas: bool
) -> tuple[Rung | None, str]:
    """See ``choose``. Snapshots that are there already, of an earlier epoch, are room."""
    room = free(directory) + sum(
        file.lstat().st_blocks * 512 for file in Path(directory).glob(f"*{SUFFIX}")
    )
    return choose(room, size, local_ranks, LADDER if replicas else ALONE, below)
