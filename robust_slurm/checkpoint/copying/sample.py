"""Reads two items of each of many tensors at once: so cheap that every save() can do it.

A write to all of a tensor, such as a swap of weights, shows in them; one to a few items may not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from . import gpu

_PLACE = torch.Tensor.data_ptr  # for map(): a third less time than a loop in Python


class _Item(NamedTuple):
    owner: int
    tensor: torch.Tensor
    offset: int
    """Items from the first one of the tensor in memory."""


class TensorSample:
    """Two items of each of ``tensors``, which keep their memory meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor], order: Sequence[int] | None = None) -> None:
        """``order``: that of another sample, whose bytes are to be compared with these."""
        self.tensors = tensors
        if order is None:  # by device, each of which is read at once
            order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].device))
        self.order = order
        self._items = [item for i in order for item in _items(i, tensors[i])]
        self._owners = [item.owner for item in self._items for _ in range(item.tensor.itemsize)]
        self._read: list[Callable[[], torch.Tensor]] = []
        self._places = [-1]

    def take(self) -> list[torch.Tensor]:
        """Return the bytes as they are now, one tensor per device, read in its current stream."""
        # share_memory_(), a queue of torch.multiprocessing or resize_() of a storage move them.
        places = list(map(_PLACE, self.tensors))
        if places != self._places:
            by_device = groupby(self._items, key=lambda item: item.tensor.device)
            self._read = [_reader(device, list(those)) for device, those in by_device]
            self._places = places
        return [read() for read in self._read]

    def differing(self, one: torch.Tensor, other: torch.Tensor) -> list[int]:
        """Indices of the tensors whose bytes differ, ascending."""
        if torch.equal(one, other):
            return []
        return sorted({self._owners[i] for i in (one != other).nonzero().flatten().tolist()})


def on_host(taken: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts from ``take`` as one tensor on the host, after a wait for the devices."""
    parts = []
    for part, device in zip(taken, gpu.each_device(taken), strict=True):
        if device is None:
            parts.append(part)
            continue
        with gpu.cuda.stream(gpu.stream(device)):  # no wait for what the device does after it
            parts.append(part.cpu())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def _items(owner: int, tensor: torch.Tensor) -> Iterable[_Item]:
    count = tensor.numel()
    for at in (count // 3, count - 1) if count else ():
        offset, left = 0, at
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            left, index = divmod(left, size)
            offset += index * stride
        yield _Item(owner, tensor, offset)


def _reader(device: torch.device, items: Sequence[_Item]) -> Callable[[], torch.Tensor]:
    """Return a function that reads the bytes of items on one device.

    Raises RuntimeError for a tensor whose memory is gone.
    """
    views = [t.as_strided((1,), (1,), t.storage_offset() + offset) for _, t, offset in items]
    places = [view.data_ptr() + byte for view in views for byte in range(view.itemsize)]
    first, size = min(places), max(places) - min(places) + 1
    memory = None
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(first), dtype=torch.uint8)
    elif device.type == "cuda":
        memory = gpu.memory(device, first, size)
    if memory is None:  # to join views takes five times as long, on a GPU more
        bytewise = [view.view(torch.uint8) for view in views]
        return lambda: torch.cat(bytewise)
    where = (torch.tensor(places, device="cpu") - first).to(device)
    return lambda: memory.index_select(0, where)
