"""A stand-in for the lowest layer of CUDA: torch.cuda and the CUDA runtime, without a device.

Tensors of the CPU pose as a device's; a copy happens when it is issued. ``calls`` holds what was
asked for, in order, with the thread that asked. Each stream has a time at which it has done what it
was given. ``now``, which is perf_counter() too, only moves on where the host waits for an event.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from robust_slurm.checkpoint.copying import gpu

DEVICE = torch.device("cuda", 3)
BUS = "0000:3B:00.0"
COPY_THREAD = "robust-copy"


class FakeEvent:
    def __init__(self, cuda: FakeCuda, blocking: bool, timed: bool) -> None:
        self.cuda, self.blocking, self.timed, self.on = cuda, blocking, timed, ""
        self.at = 0.0

    def record(self, on: FakeStream) -> None:
        self.on, self.at = on.name, max(self.cuda.now, on.done_at)
        if not self.timed:
            self.cuda.note(f"record on {on.name}")

    def synchronize(self) -> None:
        self.cuda.note(f"host waits for {self.on}{'' if self.blocking else ', spinning'}")
        if threading.current_thread().name == COPY_THREAD:
            self.cuda.may_end.wait(20)
        self.cuda.now = max(self.cuda.now, self.at)

    def query(self) -> bool:
        return self.cuda.now >= self.at

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.timed and end.timed and self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready, or an event without a time")
        return 1000 * (end.at - self.at)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.done_at = 0.0

    def busy(self, seconds: float) -> None:
        """Give the stream work for so long."""
        self.done_at = max(self.cuda.now, self.done_at) + seconds

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.note(f"{self.name} waits for {event.on}")
        self.done_at = max(self.done_at, event.at)


class FakeRuntime:
    """cudart, as torch has it and as it is loaded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.error = 0
        """The return value of cudaHostRegister."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.cuda.note(f"register with flags {flags} on device {self.cuda.current_device()}")
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.cuda.note("unregister")
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"

    def cudaGetLastError(self) -> int:
        self.cuda.note("clear the error")
        return self.error

    def cudaThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        self.cuda.note("set the capture mode")
        return 0

    def cudaDeviceGetPCIBusId(
        self, name: ctypes.Array[ctypes.c_char], size: object, device: ctypes.c_int
    ) -> int:
        name.value = BUS.encode()
        return 0 if device.value == self.cuda.current_device() else 101


class FakeCuda:
    """torch.cuda, in use by the calling thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.initialized = True
        self.capturing = False
        self.runtime = FakeRuntime(self)
        self.compute = FakeStream(self, "compute")
        self.copy_s = 0.0
        """Time that the device takes for the copies of a snapshot."""
        self.now = 0.0
        self.may_end = threading.Event()
        """Cleared, no copy in the background ends."""
        self.may_end.set()
        self._thread = threading.local()
        self._thread.device = DEVICE.index

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))

    def of(self, thread: str) -> list[str]:
        """Return the calls of one thread."""
        return [call for name, call in self.calls if name == thread]

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)  # as CUDA: a new thread is on device 0

    def set_device(self, device: int) -> None:
        self._thread.device = device
        self.note(f"set device {device}")

    def current_stream(self, device: torch.device | int) -> FakeStream:
        return self.compute

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "copies")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.note(f"issue on {stream.name}")
        stream.busy(self.copy_s)
        yield

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, blocking, enable_timing)

    def cudart(self) -> FakeRuntime:
        return self.runtime


def install(
    monkeypatch: pytest.MonkeyPatch,
    poses: Callable[[torch.Tensor], bool] = lambda tensor: tensor.dim() > 0,
) -> FakeCuda:
    """Put a fake in the place of CUDA; tensors that ``poses`` holds of lie on ``DEVICE``."""
    cuda = FakeCuda()
    monkeypatch.setattr(gpu, "cuda", cuda)
    monkeypatch.setattr(time, "perf_counter", lambda: cuda.now)
    monkeypatch.setattr(gpu, "runtimes", lambda: [cuda.runtime])
    monkeypatch.setattr(gpu, "_DEVICE", lambda tensor: DEVICE if poses(tensor) else tensor.device)
    monkeypatch.setattr(gpu, "_streams", {})
    monkeypatch.setattr(gpu, "_entered", threading.local())
    return cuda
