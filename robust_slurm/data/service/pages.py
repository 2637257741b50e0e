"""The arrays of one share of one step, in memory that processes map and nobody can change.

An anonymous file (memfd): written once, sealed against writing and resizing, and passed as a
descriptor. It needs no room in /dev/shm and leaves nothing there: the kernel frees it with
its last mapping. A rank maps it privately: what a training writes in place is its own copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGNED = 64  # bytes
_KINDS = "biufcSUmM"  # numpy's kinds of plain values


class SealedPage(NamedTuple):
    """The memory, and what is in it. The file is open until ``close``."""

    fd: int
    size: int
    arrays: list[list[Any]]  # name, dtype, shape, offset

    def head(self) -> dict[str, Any]:
        """Return what a rank needs beside the descriptor."""
        return {"size": self.size, "arrays": self.arrays}

    def close(self) -> None:
        """Close the file; the mappings of others stay."""
        os.close(self.fd)


def write(batch: Mapping[str, Any]) -> SealedPage:
    """Copy a batch into memory of its own. Raises DataError for what cannot be shared."""
    import numpy as np

    arrays: list[list[Any]] = []
    parts: list[tuple[int, Any]] = []
    end = 0
    for name, value in batch.items():
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype.kind not in _KINDS or array.dtype.names:
            raise DataError(
                f"{name!r} is an array of {array.dtype}: a data process hands over numbers and "
                "text alone; convert it in decode, or give Loader the plan itself"
            )
        start = -(-end // _ALIGNED) * _ALIGNED
        arrays.append([str(name), array.dtype.str, list(array.shape), start])
        parts.append((start, array))
        end = start + array.nbytes
    size = max(end, 1)
    fd = os.memfd_create("robust-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        for start, array in parts:
            view = memoryview(array.reshape(-1).view("u1") if array.nbytes else b"")
            while view:
                written = os.pwrite(fd, view, start)
                view, start = view[written:], start + written
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return SealedPage(fd, size, arrays)


def read(fd: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """Map a batch without copying it, and close ``fd``. Raises DataError if it is not whole."""
    import numpy as np

    try:
        size = int(head["size"])
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        if os.fstat(fd).st_size != size or not sealed:
            raise ValueError("its size or seals are not those of a finished step")
        memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        batch: dict[str, Any] = {}
        for name, kind, shape, start in head["arrays"]:
            dtype = np.dtype(kind)
            count = prod(shape)
            if not 0 <= start <= size - count * dtype.itemsize or dtype.kind not in _KINDS:
                raise ValueError(f"{name}: beyond the end")
            array = np.frombuffer(memory, dtype, count, start) if count else np.empty(0, dtype)
            batch[name] = array.reshape(shape)
        return batch
    except (OSError, ValueError, TypeError, LookupError) as err:
        raise DataError(f"a step of the data process cannot be used: {err}") from err
    finally:
        os.close(fd)
