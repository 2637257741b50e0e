"""Files of the durable tier: opened without following links, written whole or not at all.

What is read is treated as hostile: a name never leads out of its directory, only regular files are
opened, and nothing larger than expected is read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..format import digest
from ..format.crc import crc32

_NAME = re.compile(r"\.?[A-Za-z0-9][A-Za-z0-9._-]{0,240}")
_REMEDY = {
    errno.ENOSPC: "the file system is full: free space there, or keep fewer checkpoints",
    errno.EDQUOT: "your quota is used up: free space there, or keep fewer checkpoints",
    errno.EROFS: "it is mounted read-only: name a directory that can be written",
    errno.EACCES: "this user may not do that there: check the owner and the mode",
    errno.EPERM: "this user may not do that there: check the owner and the mode",
    errno.ENOENT: "it is gone; is the file system still mounted?",
    errno.ENOTDIR: "a directory is needed there",
    errno.ELOOP: "it is a link, and links are not followed there",
    errno.ESTALE: "the server of the file system forgot it; is it still exported?",
    errno.EIO: "the disk or the file system is failing; see the kernel log",
}


NEWER = "a newer step is on disk"
"""Reason for a failed commit that does no harm: nobody needs that step."""


class DurableError(Exception):
    """A durable checkpoint cannot be used or written; the text says what, where and what to do."""


def explain(err: OSError, doing: str, path: str | Path) -> str:
    """Describe an error. ``doing`` names what failed: "writing rank 3's part of step 100"."""
    said = os.strerror(err.errno) if err.errno else str(err)
    remedy = _REMEDY.get(err.errno or 0)
    return f"{doing}: {path}: {said}" + (f"; {remedy}" if remedy else "")


def is_plain_name(name: object) -> bool:
    """A file name of ours: no directory in it, nothing a shell or a terminal would act on."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def open_inside(directory: Path, name: str) -> int:
    """A read-only descriptor of the regular file ``name`` in ``directory``.

    Neither may be a symbolic link. Raises OSError; ELOOP for a link, EINVAL for no regular file.
    """
    if not is_plain_name(name):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # NONBLOCK: opening a pipe that someone put there must not hang.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return file


def read_inside(directory: Path, name: str, limit: int) -> bytes:
    """The whole file. Raises OSError, and DurableError when it is larger than ``limit`` bytes."""
    with open(open_inside(directory, name), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise DurableError(f"{directory / name} is larger than {limit} bytes; it is not ours")
    return raw


def size_inside(directory: Path, name: str) -> int:
    """Bytes of the regular file. Raises OSError."""
    file = open_inside(directory, name)
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def digest_inside(directory: Path, name: str) -> tuple[int, list[int]]:
    """Size and digest (see ``digest``) of the file as it is now. Raises OSError."""
    file = open_inside(directory, name)
    try:
        size = os.fstat(file).st_size
        return size, digest.take(file, size)
    finally:
        os.close(file)


def digest_of(raw: bytes) -> list[int]:
    """Return the digest that a file with this content would have."""
    step = digest.CHUNK
    return [crc32(raw[at : at + step]) for at in range(0, len(raw), step)]


def write_whole(path: Path, raw: bytes, tmp: Path | None = None) -> None:
    """Make ``path`` hold ``raw``, or leave it as it was. On the disk when this returns.

    ``tmp``: the file that is written first; to be named if several may write the same path.
    """
    tmp = tmp or path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except OSError:
        remove(tmp)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk, where the file system can do that."""
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(at)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(at)


def remove(path: Path) -> None:
    """Unlink a file; ignore a failure."""
    try:
        path.unlink()
    except OSError:
        pass


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
