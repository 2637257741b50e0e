"""The state that bench.checkpoint saves, the training around it, and a plain memcpy.

The state is model parameters and Adam's two moments in float32, one third each, in as many tensors
as a transformer of 16 layers has. A step is forward, backward and Adam on one or all cores.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import zlib
from typing import Any

import torch
from torch import nn

LAYERS = 16
HEADS = 8
SEQUENCE = 64
MB = 1 << 20
SIZES = {"64MB": 64 * MB, "256MB": 256 * MB, "1GB": 1024 * MB}
COPIES_PER_STEP = 20
"""A step takes at least this many times as long as one memcpy of the state."""


class Work:
    """A model with its optimizer, and steps to do; ``nbytes`` is the size of all tensors saved."""

    def __init__(self, wanted: int, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        # A layer has 12 d² + 13 d parameters, and each parameter is kept three times in 4 bytes.
        width = max(HEADS, round((wanted / 12 / layers / 12) ** 0.5 / HEADS) * HEADS)
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True)
        self.model: nn.Module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)
        self.width = width
        self.batch = torch.randn(1, SEQUENCE, width)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of a checkpoint; the moments exist after the first step."""
        found = list(self.model.state_dict().values())
        for state in self.optimizer.state_dict()["state"].values():
            found += state.values()
        return found

    def state(self) -> dict[str, Any]:
        """Return the state as scripts hand it to torch.save and to the peers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        """One training step; also the tensors that Adam makes at the first one."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def calibrate(self, seconds: float) -> float:
        """Choose the batch so that a step takes at least about ``seconds``; how long it takes."""
        self.step()
        size = 1
        for _ in range(4):
            self.batch = torch.randn(size, SEQUENCE, self.width)
            self.step()
            took = min(_seconds(self.step) for _ in range(2))
            if took >= seconds:
                break
            size = max(size + 1, round(size * 1.1 * seconds / took))
        return took

    def crc(self) -> int:
        """Return the checksum of all tensors, in their order: it shows that a restore was right."""
        value = 0
        for tensor in self.tensors():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            value = zlib.crc32(flat.numpy().data, value)
        return value


class Memcpy:
    """The limit: the C library's memcpy between private buffers, all pages touched before."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers = [mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE) for _ in range(2)]
        self._addresses = []
        for value, buffer in enumerate(self._buffers, 1):
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            ctypes.memset(address, value, nbytes)
            self._addresses.append(address)
        self.seconds()

    def seconds(self) -> float:
        """Time one copy."""
        return self._copy(self._addresses[1])

    def new_seconds(self) -> float:
        """Time one copy to memory that the process has just got: its pages come one by one."""
        buffer = mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE)
        return self._copy(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))

    def _copy(self, target: int) -> float:
        began = time.perf_counter()
        ctypes.memmove(target, self._addresses[0], self._nbytes)
        return time.perf_counter() - began


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
