"""Read files so that a node has them in memory: ``python preread.py BYTES SECONDS PATH…``.

Standard library alone. Links below a directory are not followed. It is the last to get CPU, and
ends at its bounds (BYTES 0: as many as fit). Prints one JSON object; exit code 0 also where not
all was read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PIECE = 4 << 20
_MOST_ERRORS = 5
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def main(argv: Sequence[str]) -> int:
    os.nice(19)
    most = min(int(argv[0]) or room(), room())
    print(json.dumps(preread(argv[2:], most, float(argv[1]))))
    return 0


def preread(paths: Sequence[str], most: int, seconds: float) -> dict[str, Any]:
    """Read at most so many bytes, for so long. ``all``: whether everything was read."""
    begin = time.monotonic()
    read, files = 0, 0
    told: list[str] = []
    whole = True
    for path in _walk(paths, told):
        if read >= most or time.monotonic() - begin >= seconds:
            whole = False
            break
        try:
            size, ended = _read(path, most - read, begin + seconds)
        except OSError as error:
            told.append(f"{path}: {error.strerror}")
            continue
        read += size
        files += 1
        whole = whole and ended
    return {
        "files": files,
        "bytes": read,
        "seconds": round(time.monotonic() - begin, 3),
        "all": whole and not told,
        "errors": told[:_MOST_ERRORS],
    }


def room() -> int:
    """Bytes that may be read without pushing others out: half of what is available."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 512
    return 0


def _walk(paths: Sequence[str], told: list[str]) -> Iterator[str]:
    for path in paths:
        try:
            directory = stat.S_ISDIR(Path(path).stat().st_mode)
        except OSError as error:
            told.append(f"{path}: {error.strerror}")
            continue
        if not directory:
            yield os.path.realpath(path)  # what a person named may be a link
            continue

        def unread(error: OSError) -> None:
            told.append(f"{error.filename}: {error.strerror}")

        for top, below, names in os.walk(path, onerror=unread):
            below.sort()
            found = (f"{top}/{name}" for name in sorted(names))
            yield from (file for file in found if not os.path.islink(file))  # noqa: PTH114


def _read(path: str, most: int, until: float) -> tuple[int, bool]:
    """Bytes read of one file, and whether that was all of it. Raises OSError."""
    fd = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = bytearray(_PIECE)
        read = 0
        while read < most and time.monotonic() < until:
            os.posix_fadvise(fd, read + _PIECE, _PIECE, os.POSIX_FADV_WILLNEED)
            got = os.readv(fd, [memoryview(buffer)[: min(_PIECE, most - read)]])
            if not got:
                return read, True
            read += got
        return read, read >= os.fstat(fd).st_size
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
