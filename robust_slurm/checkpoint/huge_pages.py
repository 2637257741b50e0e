"""Huge pages for new tensors: the first write to memory costs a fault for each page."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

HUGE = 2 << 20  # bytes
_MADV_HUGEPAGE = 14


def advise_huge(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a new CPU tensor, before it is written. Advice: it never fails."""
    if tensor.nbytes < 2 * HUGE or tensor.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // HUGE) * HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
