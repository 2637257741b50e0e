"""Claims a rank's record of the heartbeat: opens it, locks it, maps it, writes our pid into it.

Imported at the first use of a heartbeat, not with it. Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from . import layout, looked


def claim(path: str, epoch: int, local_rank: int | None) -> tuple[mmap.mmap, int] | None:
    """Map and own the record; None if a live process owns it. Raises OSError, ValueError.

    The descriptor holds the lock: closing any descriptor of the file would drop it.
    """
    fd = _open(path, epoch, local_rank)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    try:
        mapped = mmap.mmap(fd, layout.SIZE)
        magic, version, size, _, local, rank, _ = layout.HEADER.unpack_from(mapped, 0)
        if (magic, version, size) != (layout.MAGIC, layout.VERSION, layout.SIZE):
            raise OSError(f"not a beat record of version {layout.VERSION}")
        # The previous owner's counts are cleared first: none of them may be read beside our pid.
        head = (layout.MAGIC, layout.VERSION, layout.SIZE, epoch, local, _global_rank(rank))
        layout.HEADER.pack_into(mapped, 0, *head, 0)
        mapped[layout.BEAT_AT :] = bytes(layout.SIZE - layout.BEAT_AT)
        layout.HEADER.pack_into(mapped, 0, *head, os.getpid())
    except BaseException:
        os.close(fd)
        raise
    looked.allow()
    looked.answer(os.path.dirname(path))  # noqa: PTH120 - pathlib may not be loaded
    return mapped, fd


def record_path(epoch: int, local_rank: int | None) -> str:
    """The file of this node's record of ``local_rank`` (default: this process's)."""
    return layout.record_path(os.environ.get("ROBUST_BEAT_DIR", ""), epoch, _local_rank(local_rank))


def _open(path: str, epoch: int, local_rank: int | None) -> int:
    """Open the record; make it if the shim did not, which does not know of its grandchildren."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        try:
            return layout.create_file(path, epoch, _local_rank(local_rank), _global_rank(-1))
        except FileExistsError:
            fd = os.open(path, flags)
    status = os.fstat(fd)
    if status.st_size != layout.SIZE or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(f"size {status.st_size} or owner {status.st_uid} is not a beat record's")
    return fd


def _local_rank(given: int | None) -> int:
    if given is not None:
        return given
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def _global_rank(otherwise: int) -> int:
    for name in ("RANK", "SLURM_PROCID"):
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            pass
    return otherwise
