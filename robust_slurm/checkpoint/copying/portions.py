"""Reads the bytes of many contiguous tensors once in at most PORTIONS saves, a portion at each.

A write to a few items of a tensor shows in no sample of it. To read all of it at each save() would
take half as long as to copy it. A small state is one portion, and so is read at each save().
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
CALL = 64 << 10  # bytes that are summed up in the time that torch needs for the call
WORD = 8  # bytes; sums of shorter words take torch ten times as long


class Run(NamedTuple):
    """Words ``start`` to ``stop`` of the tensor with this index."""

    owner: int
    start: int
    stop: int


class Portions:
    """The portions of ``tensors``, which keep their memory meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        words = [_count(tensor) for tensor in tensors]
        self.runs = divide(words, portions_of(words))
        self._views: dict[int, list[torch.Tensor]] = {}

    def take(self, turn: int) -> list[torch.Tensor]:
        """The sums of ``runs[turn]`` as ``sums`` gives them."""
        if turn not in self._views:  # to make them takes as long as to sum them up
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
    """Return the portion of a step, the same on all ranks. All come in turn, whatever number all
    saved steps are a multiple of. Pure."""
    return (step * 0x9E3779B1 % 2**32) * count >> 32


def views(tensors: Sequence[torch.Tensor], runs: Sequence[Run]) -> list[torch.Tensor]:
    """Return the words of each run."""
    return [_words(tensors[run.owner])[run.start : run.stop] for run in runs]


def sums(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of each, by device: computed there, in the order of its current stream."""
    by_device = groupby((words.sum() for words in of), key=lambda one: one.device)
    return [torch.stack(list(those)) for _, those in by_device]


def differing(runs: Sequence[Run], one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Indices of the tensors whose sums differ, ascending."""
    return sorted({runs[i].owner for i in (one != other).nonzero().flatten().tolist()})


def _count(tensor: torch.Tensor) -> int:
    """Whole words of a tensor, 0 where torch cannot read words without a copy."""
    there = tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize % WORD == 0
    return tensor.nbytes // WORD if there else 0


def _words(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().view(-1).view(torch.uint8)
    return raw[: tensor.nbytes // WORD * WORD].view(torch.int64)
