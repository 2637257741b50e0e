"""The trainings of ``bench.checkpoint.cuda``: the work of bench.checkpoint on a device, by kind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.checkpoint.work import LAYERS, SEQUENCE, Work
from robust_slurm import Checkpointer

BATCH = 16
MODELS = ("two_dtypes", "strided")
"""Kinds with a model of their own: parameters in float32 and bfloat16; not contiguous ones."""


class As(nn.Module):
    """A module that gives its input in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def model_of(kind: str, wanted: int) -> tuple[nn.Module, int]:
    """A model whose state with Adam has about ``wanted`` bytes, and its width."""
    width = max(8, math.isqrt(wanted // 12 // 2))
    first, half = nn.Linear(width, width), torch.bfloat16
    if kind == "two_dtypes":
        second = nn.Linear(width, width, dtype=half)
        return nn.Sequential(first, As(half), second, As(torch.float32)), width
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    return nn.Sequential(first, nn.Linear(width, width)), width


class DeviceWork(Work):
    """State and steps on a device."""

    def __init__(self, wanted: int, device: str, kind: str, layers: int = LAYERS) -> None:
        super().__init__(wanted, layers)
        self.device = torch.device(device)
        self.kind = kind
        self.beside: Callable[[], None] = lambda: None
        """Called at the beginning of each step."""
        if kind in MODELS:
            self.model, self.width = model_of(kind, wanted)
        self.model.to(self.device)
        # In a graph Adam counts its steps on the device.
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-5, capturable=kind == "graph" and device == "cuda"
        )
        self.batch = torch.randn(BATCH, SEQUENCE, self.width, device=self.device)
        self.scaler = torch.amp.GradScaler(device) if kind == "amp" else None
        self.graph: Any = None

    def step(self) -> None:
        """One step; a graph replays it."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.beside()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.scaler is not None):
            loss = self.model(self.batch).square().mean()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def capture(self, checkpointer: Checkpointer, number: int) -> None:
        """Record the step as a graph; a save() in it is left out, and may not disturb it."""
        if self.device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.step()
            checkpointer.save(number)
        self.graph = graph

    def crc(self) -> int:
        """Return the checksum of all tensors, in their order."""
        self.sync()
        return super().crc()

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of a checkpoint, on the host."""
        return [tensor.cpu() for tensor in super().tensors()]

    def size(self) -> tuple[int, int]:
        """Bytes and number of all tensors of a checkpoint."""
        tensors = super().tensors()
        return sum(tensor.nbytes for tensor in tensors), len(tensors)

    def sync(self, *, stream: bool = False) -> None:
        """Wait until the device, or the training's ``stream`` on it, has done all it was given."""
        if self.device.type == "cuda":
            (torch.cuda.current_stream() if stream else torch.cuda).synchronize()

    def extra(self) -> dict[str, Any]:
        """Return the objects that are saved beside model and optimizer."""
        return {} if self.scaler is None else {"scaler": self.scaler}

    def extra_state(self) -> Any:
        """The same, to be compared."""
        return None if self.scaler is None else self.scaler.state_dict()

    def checkpointer(self) -> Checkpointer:
        """A Checkpointer of all of it."""
        return Checkpointer(model=self.model, optimizer=self.optimizer, extra=self.extra())


class Busy:
    """Products of matrices that keep the device busy beside a training."""

    def __init__(self, work: DeviceWork) -> None:
        side = 4096 if work.device.type == "cuda" else 32
        self._matrix = torch.randn(side, side, device=work.device)
        self._out = torch.empty_like(self._matrix)
        self.queue(3)
        work.sync()
        began = time.perf_counter()
        self.queue(10)
        work.sync()
        self._each = (time.perf_counter() - began) / 10

    def count(self, seconds: float) -> int:
        """Return how many products take so long."""
        return max(0, math.ceil(seconds / self._each))

    def queue(self, count: int) -> None:
        """Give the device so many; on a GPU without a wait."""
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._out)
