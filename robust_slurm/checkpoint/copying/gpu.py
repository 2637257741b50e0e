"""The edge to CUDA: the device of a thread, events, and host memory that a device writes to.

Nothing here starts CUDA. torch's streams and events are used; what torch does not offer is called
in the CUDA runtime that it has loaded.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

cuda: Any = torch.cuda  # torch does not type all of it
PORTABLE = 1  # cudaHostRegisterPortable: registered for every device of the process
THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
PCI = Path("/sys/bus/pci/devices")

_DEVICE = attrgetter("device")  # for map(): half the time of a loop in Python
_entered = threading.local()
_streams: dict[torch.device, Any] = {}


def current() -> int | None:
    """The device that the calling thread uses; None where CUDA is not in use."""
    return int(cuda.current_device()) if cuda.is_initialized() else None


def capturing() -> bool:
    """True if the calling thread is capturing a CUDA graph: no copy and no wait belongs in it."""
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def devices_of(*lists: Iterable[torch.Tensor]) -> set[torch.device]:
    """The CUDA devices that hold any of these tensors."""
    if not cuda.is_initialized():
        return set()
    found = {device for each in lists for device in set(map(_DEVICE, each))}
    return {device for device in found if device.type == "cuda"}


def each_device(tensors: Iterable[torch.Tensor]) -> list[torch.device | None]:
    """The CUDA device of each; None for one that is on no such device."""
    return [device if device.type == "cuda" else None for device in map(_DEVICE, tensors)]


def memory(device: torch.device, first: int, size: int) -> torch.Tensor | None:
    """The device's memory from address ``first`` on, as uint8, whether all of it is in use or not.

    None where torch cannot do that: without NumPy, which reads the description, or for a GPU of
    another vendor. Reading an address that is not mapped makes every later CUDA call fail.
    """
    described = {"shape": (size,), "typestr": "|u1", "data": (first, False), "version": 3}
    try:
        found = torch.as_tensor(
            type("DeviceMemory", (), {"__cuda_array_interface__": described})(), device=device
        )
    except Exception:  # noqa: BLE001 - a RuntimeError, TypeError, … by version
        return None
    return found if found.data_ptr() == first else None


def enter(device: int | None) -> None:
    """Make ``device`` that of the calling thread; a new thread would open a context on device 0.

    Graphs that other threads capture are not disturbed by this thread's waits from now on.
    """
    if device is None or getattr(_entered, "device", None) == device:
        return
    cuda.set_device(device)
    _entered.device = device
    for runtime in runtimes():
        mode = ctypes.c_int(THREAD_LOCAL)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def stream(device: torch.device) -> Any:
    """The stream of the copies from ``device``."""
    if device not in _streams:
        _streams[device] = cuda.Stream(device)
    return _streams[device]


def event(on: Any, *, timed: bool = False) -> Any:
    """Record an event behind all work queued in stream ``on``; a thread that waits for it sleeps.

    ``timed``: the device notes the time at which it reaches the event.
    """
    made = cuda.Event(enable_timing=timed, blocking=True)
    made.record(on)
    return made


def drain(devices: Collection[torch.device]) -> None:
    """Wait until the current streams of ``devices`` have done all work that is queued now."""
    for each in [event(cuda.current_stream(device)) for device in devices]:
        each.synchronize()


def register(address: int, size: int) -> tuple[Callable[[], None] | None, str]:
    """Register host memory, so that a device can write to it by itself.

    Returns the function that undoes this and "", or None and the reason why it failed. A failure is
    not raised again by a later CUDA call.
    """
    runtime = cuda.cudart()
    failed = runtime.cudaHostRegister(address, size, PORTABLE)
    if int(failed) == 0:
        return lambda: _unregister(runtime, address), ""
    clear_error()
    return None, f"{runtime.cudaGetErrorString(failed)}, CUDA error {int(failed)}"


def _unregister(runtime: Any, address: int) -> None:
    if int(runtime.cudaHostUnregister(address)) != 0:
        clear_error()


def clear_error() -> None:
    """Forget the calling thread's last CUDA error, or the next check of a kernel would raise it."""
    for runtime in runtimes():
        runtime.cudaGetLastError()


def runtimes() -> list[Any]:
    """Every CUDA runtime that is loaded: torch's is among them, and may have any name."""
    return [ctypes.CDLL(path) for path in _loaded()]


@cache
def _loaded() -> tuple[str, ...]:
    return loaded(Path("/proc/self/maps").read_text("utf-8", "replace"))


def loaded(maps: str) -> tuple[str, ...]:
    """Paths of the CUDA runtimes in the text of a /proc/PID/maps. Pure."""
    paths = (line.split(maxsplit=5)[5:] for line in maps.splitlines())
    found = {path[0] for path in paths if path and "libcudart" in Path(path[0]).name}
    return tuple(sorted(path for path in found if not path.endswith(" (deleted)")))


@contextmanager
def nearby(pci: Path = PCI) -> Iterator[None]:
    """Run the calling thread on CPUs beside its GPU meanwhile, if the job has any of them: a page
    comes from the memory of the NUMA node on which it is first touched."""
    cpus = near(pci) if cuda.is_initialized() else set()
    before = os.sched_getaffinity(0)
    if not cpus & before:  # none known, or the job has none of them
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def near(pci: Path) -> set[int]:
    """Return the CPUs beside this thread's GPU; none where they are not known."""
    name, size = ctypes.create_string_buffer(32), ctypes.c_int(32)
    for runtime in runtimes():
        if runtime.cudaDeviceGetPCIBusId(name, size, ctypes.c_int(cuda.current_device())) == 0:
            try:
                return cpu_list((pci / name.value.decode().lower() / "local_cpulist").read_text())
            except (OSError, ValueError):
                return set()
    return set()


def cpu_list(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
