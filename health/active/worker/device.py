"""The devices of this process, and how a test is run on each of them. Imports torch.

The same code path for CUDA and CPU: a test asks its ``WorkerDevice`` for what differs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from health.active_tests import Measured
from robust_slurm.auto.headroom import headroom

MOST_WRONG = 4  # lines of one test on one device: more say nothing new

# Words of torch, CUDA and NCCL when the device itself has failed. An illegal memory access is a
# program's mistake in general, so it is not here; an "unspecified launch failure" is that too in
# programs of users, but the ones that run here are the same on every device.
_FAULTS = (
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "hardware error",
    "hardware stack error",
    "gpu is lost",
    "fallen off the bus",
    "unspecified launch failure",
)

_ODD, _ODD2, _ODD3 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """One device. ``index`` is CUDA's for this process (None: the CPU); ``name`` is the node's."""

    name: str
    model: str
    index: int | None = None

    @property
    def cuda(self) -> bool:
        return self.index is not None

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)

    def use(self) -> None:
        """Make it the current device of this thread."""
        if self.index is not None:
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        if self.index is not None:
            torch.cuda.synchronize(self.index)

    def timed(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds that ``work`` takes on the device; it has ended when this returns.

        ``times`` in a row, of which the mean: on a GPU its start is then hidden by the one before.
        """
        if self.index is None:
            begin = time.perf_counter()
            for _ in range(times):
                work()
            return (time.perf_counter() - begin) / times
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(times):
            work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / times

    def free(self) -> int:
        """Bytes of memory that may still be taken; on the CPU also by what cgroups allow."""
        if self.index is None:
            return headroom()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.index)[0])


def devices() -> list[WorkerDevice]:
    """Return the devices that this process may use: every GPU, or without one the CPU.

    RuntimeError where the node has GPUs that torch cannot use: testing the CPU would clear them.
    """
    if torch.cuda.is_available():
        return [_gpu(index) for index in range(torch.cuda.device_count())]
    if unused := _unusable():
        raise RuntimeError(
            f"torch {torch.__version__} (built for CUDA {torch.version.cuda}) sees no GPU, though "
            f"{unused} can be opened; run `python -c 'import torch; torch.cuda.init()'` there"
        )
    return [WorkerDevice("cpu", "cpu")]


def _gpu(index: int) -> WorkerDevice:
    about = torch.cuda.get_device_properties(index)
    numbers = [getattr(about, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    if min(numbers) < 0:  # torch before 2.9
        numbers = address(str(getattr(about, "uuid", "")))
    return WorkerDevice(f"gpu{number_on_node(numbers, index)}", str(about.name), index)


def address(uuid: str, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> list[int]:
    """Domain, bus and device of the GPU with this UUID, by what the driver says; -1: unknown."""
    for told in gpus.glob("*/information"):
        try:
            if uuid and f"GPU-{uuid}" in told.read_text(errors="replace").split():
                return [int(part, 16) for part in told.parent.name.partition(".")[0].split(":")]
        except (OSError, ValueError):
            continue
    return [-1, -1, -1]


def number_on_node(
    pci: Sequence[int], index: int, bound: Path = Path("/sys/bus/pci/drivers/nvidia")
) -> int:
    """Return the driver's (NVML's) number of a GPU: its rank by PCI address among the node's GPUs.

    CUDA's ``index`` counts only what this process may use; it is the answer where /sys has none.
    ``pci``: domain, bus, device.
    """
    try:
        found = sorted(entry.name for entry in bound.iterdir() if entry.name.count(":") == 2)
    except OSError:
        return index
    ours = "{:04x}:{:02x}:{:02x}.0".format(*pci) if min(pci) >= 0 else ""
    return found.index(ours) if ours in found else index


def _unusable() -> str:
    """Return a GPU that this process may open though torch sees none; "" if the job hides GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return ""  # empty, or wrong: the job's wish
    for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            continue
        return str(path)
    return ""


def use_all_cores() -> None:
    """Use one thread for each core that this process may use, the same number in all tests."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def failed(err: BaseException) -> tuple[tuple[str, ...], str]:
    """(wrong, error) for what a test raised: proof only where the device says that it failed."""
    said = str(err).partition("Exception raised from")[0]  # what follows is C++ frames
    text = " ".join(f"{type(err).__name__}: {said}".split())[:280]
    if any(fault in text.lower() for fault in _FAULTS):
        return (text,), ""
    return (), text


def on_each(
    test: str, devices: Sequence[WorkerDevice], work: Callable[[WorkerDevice], Measured]
) -> list[Measured]:
    """Run ``work`` on all devices at once, a thread for each; what it raises is in the answer."""
    answers: dict[int, Measured] = {}

    def attempt(at: int, device: WorkerDevice) -> None:
        begin = time.monotonic()
        try:
            device.use()
            answer = work(device)
        except Exception as err:  # noqa: BLE001 - whatever it is, it is this test's answer
            wrong, error = failed(err)
            answer = Measured(test, "", wrong=wrong, error=error)
        answers[at] = answer._replace(
            device=device.name,
            model=device.model,
            seconds=round(time.monotonic() - begin, 3),
        )

    if len(devices) == 1:
        attempt(0, devices[0])
    else:
        threads = [threading.Thread(target=attempt, args=each) for each in enumerate(devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [answers[at] for at in range(len(devices))]


def hashed(seed: int, count: int, device: torch.device, start: int = 0) -> torch.Tensor:
    """int64 numbers that look random, by integer arithmetic only: the same on every device.

    splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x.add_(_signed(seed * _ODD2)).mul_(_signed(_ODD))
    x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_signed(_ODD2))
    x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_signed(_ODD3))
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def integers(seed: int, count: int, most: int, device: torch.device) -> torch.Tensor:
    """int64 numbers from -most to most."""
    x = hashed(seed, count, device)
    return (
        x.bitwise_right_shift_(20).bitwise_and_((1 << 43) - 1).remainder_(2 * most + 1).sub_(most)
    )


def fractions(seed: int, count: int, bits: int, device: torch.device) -> torch.Tensor:
    """float32 numbers between -1 and 1, multiples of 2^-bits (at most 24: exact)."""
    most = (1 << bits) - 1
    return integers(seed, count, most, device).to(torch.float32).mul_(2.0**-bits)


def _signed(number: int) -> int:
    """Return the number as int64 holds its bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and 0 is not -0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
