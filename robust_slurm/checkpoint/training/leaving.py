"""A rank whose snapshots find no room in memory: the words for it, and the way to disk."""

from __future__ import annotations

from pathlib import Path

from ..copying.slots import Ring
from ..format.layout import Snapshot
from ..format.sizes import megabytes
from .options import Options


def by_disk(options: Options, about: Snapshot) -> tuple[Ring | None, str]:
    """Slots on a disk, by way of which durable steps can go on, and what to tell people."""
    staging = _staging(options, about)
    if staging is None:
        return None, "There are no durable ones either"
    try:
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        ring = Ring(staging, about.rank, {}, own=1)
    except OSError as error:
        return None, f"There are no durable ones either ({error})"
    return ring, f"Durable checkpoints go on by way of {staging}"


def no_room(size: int, ring: Ring | None, error: OSError) -> str:
    """Say that a snapshot of ``size`` bytes did not fit."""
    where = ring.directory if ring is not None else ""
    return f"a snapshot of {megabytes(size)} finds no room in {where} ({error.strerror})"


def _staging(options: Options, about: Snapshot) -> Path | None:
    if options.directory:
        return Path(options.directory) / ".staging"
    if options.local_directory:
        return Path(options.local_directory) / about.job
    return None


def holds(ring: Ring) -> str:
    """Name the memory or disk that holds the ring's files, in terms that a user can change."""
    is_shm = ring.directory.is_relative_to("/dev/shm")
    return "/dev/shm (a tmpfs) or the job's --mem" if is_shm else f"the disk of {ring.directory}"
