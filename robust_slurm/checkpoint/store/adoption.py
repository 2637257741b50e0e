"""Record complete snapshots in the store's directory that no message has reported.

A rank that dies after the write of a snapshot and before its ``saved`` message leaves such a file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from robust_slurm.checkpoint.format import digest, layout
from robust_slurm.checkpoint.store import shelf
from robust_slurm.checkpoint.store.ranks import StoreRank
from robust_slurm.checkpoint.store.shelf import OWN, Shelf, ShelfRecord


def adopt(store_shelf: Shelf, rank: StoreRank, epoch: int, line: int, deadline: float) -> None:
    """Record the rank's complete snapshots of this epoch and of timeline ``line`` or later.

    Reads them whole. ``deadline``: s to wait while another thread reads a file of the rank.
    """
    if rank.enrolment is None or not rank.digesting.acquire(timeout=deadline):
        return
    try:
        for path in store_shelf.directory.glob(f"{OWN}-{rank.number}-*{layout.SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                shelf.parse_name(path.name)
                _adopt_file(store_shelf, rank.number, path, epoch, line)
    finally:
        rank.digesting.release()


def _adopt_file(store_shelf: Shelf, rank: int, path: Path, epoch: int, line: int) -> None:
    fd, size, inode = shelf.open_snapshot(path)
    with open(fd, "rb", buffering=0):
        header = shelf.read_header(fd, size)
        known = store_shelf.get(path.name)
        if known is not None and (known.step, known.inode) == (header.step, inode):
            return
        if (header.rank, header.epoch) != (rank, epoch):
            return
        if header.line < line:  # its timeline was given up
            return
        record = ShelfRecord(
            path.name, step=header.step, world=header.world, needs=header.needs,
            epoch=header.epoch, size=size, inode=inode,
            digest=digest.take(fd, size, digest.workers(8)), same=header.same, line=header.line,
        )  # fmt: skip
        if not store_shelf.overwritten(fd, record):
            store_shelf.put(record)
