"""Sum up the bytes of many contiguous tensors, one portion at each save().

All bytes have been read after at most PORTIONS saves. A sample of a tensor may miss a write to a
few of its items, and reading all of it at each save() would take half as long as copying it. A
small state is a single portion, which is read at each save().
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

PORTIONS = 64
"""Summing up a portion takes 1 % of a memcpy of all: 0.3 ms of 30 for 256 MB in 768 tensors."""
LEAST = 2 << 20
"""Bytes of a portion, unless all tensors have less: 0.1 to 0.2 ms."""
CALL = 64 << 10  # bytes that torch sums up in the time that one call costs
WORD = 8  # bytes; sums of shorter words take torch ten times as long


class Run(NamedTuple):
    """Words ``start`` to ``stop`` of the tensor with the index ``owner``."""

    owner: int
    start: int
    stop: int


class Portions:
    """The portions of ``tensors``, whose memory must not be replaced meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        words = [_count(tensor) for tensor in tensors]
        self.runs = divide(words, portions_of(words))
        self._views: dict[int, list[torch.Tensor]] = {}

    def take(self, turn: int) -> list[torch.Tensor]:
        """Return the sums of ``runs[turn]``, as ``sums`` does."""
        if turn not in self._views:  # making the views takes as long as summing them up
            self._views[turn] = views(self._tensors, self.runs[turn])
        return sums(self._views[turn])


def portions_of(words: Sequence[int]) -> int:
    """Return the number of portions of tensors of so many words. Pure."""
    cost = sum(size * WORD + CALL for size in words if size)
    return max(1, min(PORTIONS, -(-cost // LEAST)))


def divide(words: Sequence[int], count: int) -> list[list[Run]]:
    """Cut tensors of so many words into ``count`` portions of equal size. Pure."""
    cuts = [sum(words) * turn // count for turn in range(1, count + 1)]
    found: list[list[Run]] = [[] for _ in cuts]
    turn = at = 0
    for owner, size in enumerate(words):
        start = 0
        while start < size:
            while cuts[turn] <= at:
                turn += 1
            stop = min(size, start + cuts[turn] - at)
            found[turn].append(Run(owner, start, stop))
            at, start = at + stop - start, stop
    return found


def turn(step: int, count: int) -> int:
    """Return the index of a step's portion, the same on all ranks. Every portion has its turn, even
    if only the multiples of some number are saved. Pure."""
    return (step * 0x9E3779B1 % 2**32) * count >> 32


def views(tensors: Sequence[torch.Tensor], runs: Sequence[Run]) -> list[torch.Tensor]:
    """Return the words of each run."""
    return [_words(tensors[run.owner])[run.start : run.stop] for run in runs]


def sums(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of each, one tensor per device, computed there in its current stream."""
    by_device = groupby((words.sum() for words in of), key=lambda one: one.device)
    return [torch.stack(list(those)) for _, those in by_device]


def _count(tensor: torch.Tensor) -> int:
    """Number of whole words of a tensor; 0 where torch cannot read words without a copy."""
    there = tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize % WORD == 0
    return tensor.nbytes // WORD if there else 0


def _words(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().view(-1).view(torch.uint8)
    return raw[: tensor.nbytes // WORD * WORD].view(torch.int64)
