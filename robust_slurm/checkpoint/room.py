"""How much memory the snapshots will take, and whether it is there. An estimate, made at start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .layout import SUFFIX
from .reserve import free
from .sizes import megabytes
from .slots import OWN

REPLICAS = 3  # of another rank


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


def check_room(directory: str, size: int, local_ranks: int, *, replicas: bool) -> tuple[bool, str]:
    """Is there room for a rank's snapshots of ``size`` bytes? And what to tell the user ("" if
    there is room for everything). Snapshots that are there already, of an earlier epoch, are room.
    """
    room = free(directory) + sum(
        file.lstat().st_blocks * 512 for file in Path(directory).glob(f"*{SUFFIX}")
    )
    bound = (OWN + 1 + (REPLICAS if replicas else 0)) * size * local_ranks
    if room >= bound:
        return True, ""
    what = (
        f"snapshots of about {megabytes(size)} each: up to {megabytes(bound)} are needed in "
        f"/dev/shm (a tmpfs) for the ranks of this node, {megabytes(room)} are free"
    )
    return room >= OWN * size, what
