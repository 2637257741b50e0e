"""Pages of a mapping before they are needed: all faults by one call that holds no interpreter lock.

Standard library only.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14; not in Python's mmap module


def populate(mapped: mmap.mmap, begin: int, size: int) -> bool:
    """Make these bytes of a writable mapping writable without a fault; ``begin`` is on a page.

    False where an older kernel cannot: then they come one by one. (mmap.madvise and MAP_POPULATE
    would hold the lock.)
    """
    held = ctypes.c_char.from_buffer(mapped, begin)
    address = ctypes.addressof(held)
    where, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
    failed: int = _libc().madvise(where, count, ctypes.c_int(_POPULATE_WRITE))
    del held  # or the mapping could not be closed
    return not failed


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
