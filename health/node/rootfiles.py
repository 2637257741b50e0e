"""Files that only root can have changed: opened directory by directory, with links refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LINE_LIMIT = 64 << 10  # bytes of one record; longer lines are no record of ours
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_dir(path: str) -> int:
    """A descriptor of a directory that only root could have put there.

    Every directory on the way must belong to root (or to us) and not be writable by others,
    unless it is sticky. Links on the way are followed first: root made them, or this shows it.
    Raises OSError naming the directory that cannot be trusted.
    """
    real = os.path.realpath(path)
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    walked = ""
    for name in [part for part in real.split("/") if part]:
        walked += f"/{name}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            below = os.open(name, flags, dir_fd=fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, walked) from None
        finally:
            os.close(fd)
        fd = below
        check(os.fstat(fd), walked, sticky=True)
    return fd


def open_file(directory: int, name: str, flags: int, mode: int = 0o644) -> int:
    """A regular file in such a directory, root's own and writable by nobody else.

    With O_CREAT it is made with ``mode``. Raises OSError when it is anything else.
    """
    fd = os.open(name, flags | _FILE, mode, dir_fd=directory)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EPERM, "not a regular file", name)
        check(info, name)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_in(path: str, name: str) -> int:
    """Open a file for reading in the directory ``path``; both must be root's. Raises OSError."""
    with closing(open_dir(path)) as directory:
        return open_file(directory, name, os.O_RDONLY)


def check(info: os.stat_result, name: str, *, sticky: bool = False) -> None:
    """Raise PermissionError if others than root (or we) can change what ``name`` is."""
    if what := wrong(info, sticky=sticky, owners=(0, os.geteuid())):
        more = ", not to root" if what.startswith("belongs") else ""
        raise PermissionError(errno.EPERM, what + more, name)


def wrong(info: os.stat_result, *, sticky: bool = False, owners: Collection[int] = (0,)) -> str:
    """Return how others than ``owners`` can change a file or directory; "": they cannot.

    ``sticky``: what is in a sticky directory is its owner's, and only that counts. A link's own
    mode says nothing.
    """
    if info.st_uid not in owners:
        return f"belongs to uid {info.st_uid}"
    exempt = stat.S_ISLNK(info.st_mode) or (
        sticky and stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    )
    if info.st_mode & 0o022 and not exempt:
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def lock(directory: int, name: str, *, wait: bool = True) -> int:
    """Take a lock file exclusively; held until the descriptor is closed.

    BlockingIOError if it is taken and ``wait`` is false. flock also works over NFS. Only root may
    open the file: a user who can read it could lock it, and keep the gate from its records.
    """
    fd = open_file(directory, name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


def line_of(record: Mapping[str, Any]) -> bytes:
    """One JSON line."""
    return json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"


def append(fd: int, lines: bytes) -> None:
    """Append whole lines in one write; a torn line that stands there stays alone.

    ``fd`` must be readable and O_APPEND. OSError ENOSPC if not all of it could be written.
    """
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        lines = b"\n" + lines
    if os.write(fd, lines) != len(lines):
        raise OSError(errno.ENOSPC, "the record was only written in part")


def tail(fd: int, most: int) -> bytes:
    """The whole lines among the last ``most`` bytes."""
    size = os.fstat(fd).st_size
    return whole_lines(_pread(fd, max(0, size - most), size), cut=size > most)


def whole_lines(raw: bytes, *, cut: bool) -> bytes:
    """Drop a torn last line, and with ``cut`` the first line, whose beginning is missing."""
    begin = raw.find(b"\n") + 1 if cut else 0
    return raw[begin : raw.rfind(b"\n") + 1]


def _pread(fd: int, begin: int, end: int) -> bytes:
    parts: list[bytes] = []
    while begin < end and (part := os.pread(fd, min(1 << 20, end - begin), begin)):
        parts.append(part)
        begin += len(part)
    return b"".join(parts)


def read_range(fd: int, begin: int, most: int, *, cut: bool) -> bytes:
    """The whole lines from ``begin`` on, at most ``most`` bytes; ``cut``: begin is inside one."""
    return whole_lines(_pread(fd, begin, begin + most), cut=cut)


def records(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects of these lines; torn, foreign and overlong lines are left out."""
    out: list[dict[str, Any]] = []
    for line in raw.split(b"\n"):
        if not line or len(line) > LINE_LIMIT:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            out.append(record)
    return out


def replace(directory: int, name: str, content: bytes, mode: int = 0o644) -> None:
    """Put a small file in place atomically. OSError, with nothing changed."""
    # Of this process alone, also where many nodes share the directory.
    draft = f".{name}.{os.uname().nodename.replace('/', '_')}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
    try:
        fd = os.open(draft, flags, mode, dir_fd=directory)
    except FileExistsError:  # of one that was killed and had our number
        os.unlink(draft, dir_fd=directory)
        fd = os.open(draft, flags, mode, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        try:
            os.unlink(draft, dir_fd=directory)
        except OSError:  # in place already, or beyond reach: the first error says more
            pass
        raise
