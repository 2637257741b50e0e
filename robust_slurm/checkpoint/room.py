"""How much memory the snapshots will take, and whether it is there. An estimate, made at start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .layout import SUFFIX
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
        f"snapshots of about {size / 1e9:.3g} GB each: up to {bound / 1e9:.3g} GB are needed in "
        f"{directory} for the ranks of this node, {room / 1e9:.3g} GB are free"
    )
    return room >= OWN * size, what


def free(directory: str) -> int:
    """Bytes that can be put there: what the file system and this process's cgroup allow."""
    about = os.statvfs(directory)
    room = about.f_bavail * about.f_frsize
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        (path,) = [line[3:] for line in lines if line.startswith("0::")]
    except (OSError, ValueError):
        return room
    group = Path("/sys/fs/cgroup") / path.lstrip("/")
    for each in (group, *group.parents):  # every level has a limit of its own
        try:
            limit = (each / "memory.max").read_text().strip()
            if limit != "max":
                room = min(room, int(limit) - int((each / "memory.current").read_text()))
        except (OSError, ValueError):
            continue
    return max(room, 0)
