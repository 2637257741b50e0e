"""The places of readers: memory that they share with the data process, and that outlives them.

So it is known at which record a reader has died, or hangs with Python's lock held. A place that is
read while it is written may mix two records: it is only for messages and for patience.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

from robust_slurm.data.service.readers.dealing import MOST

_RECORD = struct.Struct("<dqq")  # monotonic seconds, part, record
_DECODE = struct.Struct("<dH246s")  # since when, or 0; length of the place, and it


class SharedPlaces:
    """The record that each lane is at, and the one that each reader decodes. ``lanes``: number of
    lanes. ``fd``: the memory; by default it is made."""

    def __init__(self, lanes: int, fd: int | None = None) -> None:
        size = MOST * _DECODE.size + lanes * _RECORD.size
        if fd is None:
            fd = os.memfd_create("robust-readers", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd = fd
        self._memory = mmap.mmap(fd, size)

    def reach(self, lane: int, part: int, record: int) -> None:
        """Note the record that comes next in a lane; part -1: none yet."""
        at = MOST * _DECODE.size + lane * _RECORD.size
        _RECORD.pack_into(self._memory, at, time.monotonic(), part, record)

    def of_lane(self, lane: int) -> tuple[float, int, int]:
        """Return when a lane has come to its record; its part; and the record."""
        at = MOST * _DECODE.size + lane * _RECORD.size
        since, part, record = _RECORD.unpack_from(self._memory, at)
        return since, part, record

    def decode(self, reader: int, place: str) -> None:
        """Note what a reader decodes from now on; "": nothing."""
        told = place.encode("utf-8", "replace")[-246:]
        began = time.monotonic() if place else 0.0
        _DECODE.pack_into(self._memory, reader * _DECODE.size, began, len(told), told)

    def of_reader(self, reader: int) -> tuple[float, str]:
        """Return since when a reader decodes, and what; "": nothing."""
        began, size, told = _DECODE.unpack_from(self._memory, reader * _DECODE.size)
        return began, told[: min(size, 246)].decode("utf-8", "replace") if began else ""
