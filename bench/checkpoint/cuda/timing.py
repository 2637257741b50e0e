"""Times the cases of ``bench.checkpoint.cuda`` in its process; each gives a dict of samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.checkpoint.cuda.kinds import Busy, DeviceWork
from bench.checkpoint.work import COPIES_PER_STEP, Memcpy
from robust_slurm import Checkpointer
from robust_slurm.checkpoint.copying.snapshot import CHUNK

WARM_UP = 8
"""Saves before anything is timed: three are copied inside save(), and every slot is there."""
SAFE = 60.0  # s
QUEUED = 0.3  # s of work that the device still has to do at save()
GIB = 1 << 30


class Timed:
    """A training with a Checkpointer that has saved WARM_UP steps."""

    def __init__(self, work: DeviceWork) -> None:
        self.work, self.at = work, 0
        self.checkpointer = work.checkpointer()
        self.checkpointer.resume()
        self.stats = self.checkpointer.stats
        for _ in range(WARM_UP):
            work.step()
            self.save()
        self.client = client_of(self.checkpointer)

    def save(self) -> float:
        """Save a step; seconds of the host."""
        self.at += 1
        began = time.perf_counter()
        self.checkpointer.save(self.at)
        return time.perf_counter() - began

    def close(self) -> None:
        self.checkpointer._close(0.0)


def client_of(checkpointer: Checkpointer) -> Any:
    session = checkpointer._session
    assert session is not None and session.client is not None
    return session.client


def host(work: DeviceWork, runs: int) -> dict[str, Any]:
    """Time save() and the optimizer's hook on the host where neither has anything to wait for: the
    device is idle at save(), and copy and digest are over at the hook."""
    timed = Timed(work)
    found = host_of(timed, runs)
    timed.close()
    return found


def host_of(timed: Timed, runs: int) -> dict[str, Any]:
    found: dict[str, Any] = {"save": [], "hook": [], "tensors": timed.work.size()[1]}
    for _ in range(runs):
        timed.work.step()
        timed.work.sync()
        found["save"].append(timed.save())
        if not timed.client.wait_safe(timed.at, SAFE):
            raise SystemExit(f"step {timed.at} is not complete after {SAFE:.0f} s")
        timed.work.sync()
        before = timed.stats.waited_s
        timed.work.step()
        found["hook"].append(timed.stats.waited_s - before)
    return found


def speed(work: DeviceWork, runs: int) -> dict[str, Any]:
    """Time steps with and without saving, in turn, that keep the device busy."""
    timed, nbytes = Timed(work), work.size()[0]
    copy = memcpy(work, nbytes)
    plain = min(seconds(work) for _ in range(3))
    limit = min(copy() for _ in range(3))
    busy = Busy(work)
    count = busy.count(COPIES_PER_STEP * limit - plain)
    # First in a step, so that the device is behind the host for all of it.
    work.beside = lambda: busy.queue(count)
    keys = ("with", "without", "paired", "memcpy", "counted", "copy")
    found: dict[str, Any] = {key: [] for key in keys} | {"products": count}
    send = timed.client.saved

    def saved(step: int, slot: int, **told: Any) -> None:
        found["counted"].append(told["blocked_s"] + told["waited_s"])
        found["copy"].append(told["copy_s"])
        send(step, slot, **told)

    timed.client.saved = saved
    for pair in range(runs):
        took = {}
        for saves in (True, False) if pair % 2 else (False, True):
            one_step(timed, saves)  # what the step before left in the background ends here
            took[saves] = one_step(timed, saves)
            found["with" if saves else "without"].append(took[saves])
        found["paired"].append(took[True] / took[False])
        found["memcpy"].append(copy())
    timed.client.saved, work.beside = send, lambda: None
    found["host"] = host_of(timed, runs)
    timed.close()
    on_gpu = work.device.type == "cuda"
    return found | {
        "nbytes": nbytes,
        "device": torch.cuda.get_device_name() if on_gpu else "none",
    }


def one_step(timed: Timed, saves: bool) -> float:
    """Seconds of a step until the training's stream has done it: a copy beside it may go on."""
    began = time.perf_counter()
    timed.work.step()
    if saves:
        timed.save()
    timed.work.sync(stream=True)
    return time.perf_counter() - began


def seconds(work: DeviceWork) -> float:
    began = time.perf_counter()
    work.step()
    work.sync(stream=True)
    return time.perf_counter() - began


def scaler(work: DeviceWork, runs: int) -> dict[str, Any]:
    """Time save() and the hook on the host while the device is busy, with a GradScaler."""
    timed, busy = Timed(work), Busy(work)
    count = busy.count(QUEUED)
    found: dict[str, Any] = {"save": [], "hook": [], "busy": [QUEUED]}
    for _ in range(runs):
        work.step()
        work.sync()
        busy.queue(count)
        found["save"].append(timed.save())
        before = timed.stats.waited_s
        work.step()
        found["hook"].append(timed.stats.waited_s - before)
    timed.close()
    return found


def temporary(device: str, nbytes: int = GIB) -> dict[str, Any]:
    """Bytes that the device needs for the time of a save of a tensor that is not contiguous."""
    width = nbytes // 4 // (1 << 14)
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(1 << 14, width, device=device).t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    checkpointer.resume()
    peaks = []
    for step in range(1, WARM_UP + 1):
        before = allocated(device)
        checkpointer.save(step)
        session = checkpointer._session
        assert session is not None and session.saver is not None
        session.saver.settle()
        optimizer.step()  # without gradients: only its hooks do something
        peaks.append(allocated(device, peak=True) - before)
    checkpointer._close(0.0)
    return {"peaks": peaks, "chunk": CHUNK}


def allocated(device: str, *, peak: bool = False) -> int:
    """Bytes that torch has given out on the device; ``peak``: at most since the last call."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    if peak:
        return int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def memcpy(work: DeviceWork, nbytes: int) -> Callable[[], float]:
    """The limit, in s a call: one copy of as many bytes from the device to pinned memory."""
    if work.device.type != "cuda":
        return Memcpy(nbytes).seconds
    source = torch.empty(nbytes, dtype=torch.uint8, device=work.device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy() -> float:
        work.sync()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        work.sync()
        return time.perf_counter() - began

    copy()
    return copy
