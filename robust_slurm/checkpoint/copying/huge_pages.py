"""Huge pages for new tensors: the first write to memory costs a fault for each page."""

from __future__ import annotations

import mmap
import sys

import torch

from ..format.advice import madvise

HUGE = 2 << 20  # bytes


def advise_huge(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a new CPU tensor, before it is written. Advice: it never fails."""
    if tensor.nbytes < 2 * HUGE or tensor.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // HUGE) * HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
