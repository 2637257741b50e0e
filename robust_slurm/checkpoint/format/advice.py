"""Advice to the kernel about memory, by calls that hold no interpreter lock. Standard library only.

(mmap.madvise and MAP_POPULATE would hold it.)
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14; not in Python's mmap module


def populate(mapped: mmap.mmap, begin: int, size: int) -> bool:
    """Make these bytes of a writable mapping writable without a fault; ``begin`` is on a page.

    False where it cannot be done, as on older kernels: then each page costs a fault.
    """
    held = ctypes.c_char.from_buffer(mapped, begin)
    done = madvise(ctypes.addressof(held), size, _POPULATE_WRITE)
    del held  # or the mapping could not be closed
    return done


def madvise(address: int, size: int, advice: int) -> bool:
    """madvise(2); False where it fails."""
    where, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
    failed: int = _libc().madvise(where, count, ctypes.c_int(advice))
    return not failed


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
