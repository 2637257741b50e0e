"""One training process of ``bench.checkpoint.cuda.cases``: ``CASE DEVICE BYTES RUNS``; prints JSON.

A case of a training that is killed prints the state of its last saved step first; ``after-CASE``
resumes it. ``speed`` times RUNS pairs of steps, with and without saving.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch

from bench.checkpoint.work import SEQUENCE, Memcpy, Work
from robust_slurm import Checkpointer
from robust_slurm.checkpoint.copying import gpu

STEPS = 8
"""Three are copied inside save() and watched; the others in the background."""
BATCH = 16


class DeviceWork(Work):
    """The state and the steps of bench.checkpoint, on a device, in one of four ways."""

    def __init__(self, wanted: int, device: str, case: str) -> None:
        super().__init__(wanted)
        self.device = torch.device(device)
        self.case = case
        self.model.to(self.device)
        # In a graph Adam counts its steps on the device.
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-5, capturable=case == "graph" and device == "cuda"
        )
        self.batch = torch.randn(BATCH, SEQUENCE, self.width, device=self.device)
        self.scaler = torch.amp.GradScaler(device) if case == "amp" else None
        self.graph: Any = None

    def step(self) -> None:
        """One step; a graph replays it."""
        if self.graph is not None:
            self.graph.replay()
            return
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

    def sync(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def extra(self) -> dict[str, Any]:
        """Return the objects that are saved beside model and optimizer."""
        return {} if self.scaler is None else {"scaler": self.scaler}

    def extra_state(self) -> Any:
        """The same, to be compared."""
        return None if self.scaler is None else self.scaler.state_dict()


def until_killed(work: DeviceWork) -> None:
    """Train, save every step, print the last one, and end as by a fault."""
    if work.case == "unpinned":  # an address that no device can register
        register = gpu.register
        gpu.register = lambda address, size: register(0, size)
    if work.case == "graph" and work.device.type == "cuda":
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work.step()  # a graph needs all tensors to be there
        torch.cuda.current_stream().wait_stream(side)
    checkpointer = Checkpointer(model=work.model, optimizer=work.optimizer, extra=work.extra())
    checkpointer.resume()
    for step in range(1, STEPS + 1):
        if work.case == "graph" and step == STEPS // 2:
            work.capture(checkpointer, step)
        work.step()
        checkpointer.save(step)
    found = {"step": STEPS, "crc": work.crc(), "extra": work.extra_state()}
    session = checkpointer._session
    assert session is not None and session.client is not None
    if not session.client.wait_safe(STEPS, 60.0):
        raise SystemExit(f"step {STEPS} is not complete after a minute")
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(work: DeviceWork) -> dict[str, Any]:
    """Resume in a fresh process, and report the state that it has then."""
    checkpointer = Checkpointer(model=work.model, optimizer=work.optimizer, extra=work.extra())
    step = checkpointer.resume()
    found = {"step": step, "crc": work.crc(), "extra": work.extra_state()}
    checkpointer._close(0.0)
    return found


def speed(work: DeviceWork, runs: int) -> dict[str, Any]:
    """Samples in s, by what they are of."""
    checkpointer = Checkpointer(model=work.model, optimizer=work.optimizer)
    checkpointer.resume()
    stats, at = checkpointer.stats, 0
    found: dict[str, Any] = {key: [] for key in ("blocked", "with", "without", "paired", "memcpy")}

    def timed(saves: bool) -> tuple[float, float]:
        nonlocal at
        at += 1
        work.sync()
        blocked, began = stats.blocked_s, time.perf_counter()
        work.step()
        if saves:
            checkpointer.save(at)
        work.sync()
        return time.perf_counter() - began, stats.blocked_s - blocked

    for _ in range(STEPS):
        timed(True)
    copy = _memcpy(work)
    for pair in range(runs):
        took = {}
        for saves in (True, False) if pair % 2 else (False, True):
            timed(saves)  # what the step before left in the background ends here
            took[saves], blocked = timed(saves)
            found["with" if saves else "without"].append(took[saves])
            found["blocked"] += [blocked] if saves else []
        found["paired"].append(took[True] / took[False])
        found["memcpy"].append(copy())
    tensors = work.tensors()
    on_gpu = work.device.type == "cuda"
    checkpointer._close(0.0)
    return found | {
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": len(tensors),
        "device": torch.cuda.get_device_name() if on_gpu else "none",
    }


def _memcpy(work: DeviceWork) -> Any:
    """The limit, in s a call: one copy of as many bytes from the device to pinned memory."""
    nbytes = sum(tensor.nbytes for tensor in work.tensors())
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


def main(argv: list[str]) -> None:
    case, device, wanted, runs = argv
    work = DeviceWork(int(wanted), device, case.removeprefix("after-"))
    if case == "speed":
        print(json.dumps(speed(work, int(runs))))
    elif case.startswith("after-"):
        print(json.dumps(resumed(work)))
    else:
        until_killed(work)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
