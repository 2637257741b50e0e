"""CRC-32 of a snapshot file, one per chunk of 16 MiB from byte 0.

The file is read through a small buffer, not mapped: a rank may cut its file short at any moment,
and touching a mapping beyond the end would kill the reader. ``crc32`` and ``preadv`` release
the interpreter's lock, so several threads share the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from robust_slurm.checkpoint.format.crc import crc32
from robust_slurm.checkpoint.format.threads import read_each

CHUNK = 16 << 20
_PIECE = 1 << 20  # read and summed while it is in the processor's cache


class FileChangedError(OSError):
    """The file ended before its size."""


def count(size: int) -> int:
    """Number of chunks of a file."""
    return -(-size // CHUNK)


def span(index: int, size: int) -> tuple[int, int]:
    """First byte and length of a chunk."""
    begin = index * CHUNK
    return begin, min(CHUNK, size - begin)


def range_crc(fd: int, at: int, left: int, buffer: memoryview) -> int:
    """CRC-32 of ``left`` bytes from byte ``at``. Raises FileChangedError, OSError."""
    crc = 0
    while left:
        piece = buffer[: min(left, len(buffer))]
        got = os.preadv(fd, [piece], at)
        if not got:
            raise FileChangedError(f"the file ends at byte {at}")
        crc = crc32(piece[:got], crc)
        at += got
        left -= got
    return crc


def chunk_crc(fd: int, index: int, size: int, buffer: memoryview | None = None) -> int:
    """CRC-32 of one chunk. Raises FileChangedError, OSError."""
    try:
        return range_crc(fd, *span(index, size), piece() if buffer is None else buffer)
    except FileChangedError as err:
        raise FileChangedError(f"{err} of {size}") from None


def piece() -> memoryview:
    """Return a buffer for ``range_crc``."""
    return memoryview(bytearray(_PIECE))


def crcs(fd: int, size: int, indices: Sequence[int], threads: int = 1) -> list[int]:
    """CRC-32 of several chunks, in their order. Raises FileChangedError, OSError."""
    results = [0] * len(indices)

    def read(place: int, buffer: memoryview) -> None:
        results[place] = chunk_crc(fd, indices[place], size, buffer)

    read_each(read, piece, len(indices), threads, "digest")
    return results


def take(fd: int, size: int, threads: int = 1) -> list[int]:
    """The digest of a file. Raises FileChangedError, OSError."""
    return crcs(fd, size, range(count(size)), threads)


def differing(
    fd: int, size: int, digest: Sequence[int], among: Iterable[int] | None = None, threads: int = 1
) -> list[int]:
    """Chunks (all, or ``among``) that are not what the digest says. Raises as ``take``."""
    if len(digest) != count(size):
        raise ValueError(f"a digest of {len(digest)} chunks for a file of {size} bytes")
    indices = list(range(len(digest)) if among is None else among)
    found = crcs(fd, size, indices, threads)
    return [index for index, crc in zip(indices, found, strict=True) if crc != digest[index]]


def alike(fd: int, other: int, size: int, among: Sequence[int], threads: int = 1) -> list[int]:
    """Chunks of ``among`` that are the same in both files, byte for byte. Raises OSError."""
    same: list[int] = []

    def read(place: int, buffers: tuple[bytearray, bytearray]) -> None:
        if _is_alike(fd, other, *span(among[place], size), *buffers):
            same.append(among[place])

    pair = lambda: (bytearray(_PIECE), bytearray(_PIECE))  # noqa: E731
    read_each(read, pair, len(among), threads, "compare")
    return same


def _is_alike(fd: int, other: int, at: int, left: int, one: bytearray, two: bytearray) -> bool:
    while left:
        count = min(left, _PIECE)
        if count < _PIECE:
            one, two = bytearray(count), bytearray(count)
        if os.preadv(fd, [one], at) != count or os.preadv(other, [two], at) != count or one != two:
            return False
        at += count
        left -= count
    return True


def describe(chunks: Sequence[int], size: int) -> str:
    """Describe, for a message, which bytes do not agree."""
    begin, length = span(chunks[0], size)
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return (
        f"chunk {chunks[0]} (bytes {begin} to {begin + length - 1}){more} "
        "differs from its digest: the memory or the disk changed it"
    )


def workers(most: int) -> int:
    """Number of threads for a checksum, at most ``most``: half of the CPUs are for the ranks."""
    return max(1, min(most, len(os.sched_getaffinity(0)) // 2))
