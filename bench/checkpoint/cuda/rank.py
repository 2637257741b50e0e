"""One process of ``bench.checkpoint.cuda.cases``: ``CASE DEVICE BYTES RUNS LAYERS``; prints JSON.

A kind of training is killed and prints the state of its last complete step first; ``after-KIND``
resumes it. The other cases time something.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import torch

from bench.checkpoint.cuda import timing
from bench.checkpoint.cuda.kinds import DeviceWork
from robust_slurm.checkpoint.copying import gpu
from robust_slurm.checkpoint.copying.snapshot import Copy

STEPS = 8
"""Three are copied inside save() and watched; the others in the background."""


def until_killed(work: DeviceWork) -> None:
    """Train, save every step, print the last one, and end as by a fault."""
    if work.kind == "unpinned":  # an address that no device can register
        register = gpu.register
        gpu.register = lambda address, size: register(0, size)
    if work.kind == "graph" and work.device.type == "cuda":
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work.step()  # a graph needs all tensors to be there
        torch.cuda.current_stream().wait_stream(side)
    checkpointer = work.checkpointer()
    checkpointer.resume()
    for step in range(1, STEPS + 1):
        if work.kind == "graph" and step == STEPS // 2:
            work.capture(checkpointer, step)
        work.step()
        checkpointer.save(step)
    found = {"step": STEPS, "crc": work.crc(), "extra": work.extra_state()}
    client = timing.client_of(checkpointer)
    if not client.wait_safe(STEPS, 60.0):
        raise SystemExit(f"step {STEPS} is not complete after a minute")
    print(json.dumps(found), flush=True)
    if work.kind == "mid_copy":
        # A device has its copies then, and the file is no snapshot.
        Copy._fit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        work.step()
        checkpointer.save(STEPS + 1)
        client.wait_safe(STEPS + 1, 60.0)
        raise SystemExit("the copy was not reached")
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(work: DeviceWork) -> dict[str, Any]:
    """Resume in a fresh process, and report the state that it has then."""
    checkpointer = work.checkpointer()
    step = checkpointer.resume()
    found = {"step": step, "crc": work.crc(), "extra": work.extra_state()}
    checkpointer._close(0.0)
    return found


def main(argv: list[str]) -> None:
    case, device, wanted, runs, layers = argv
    if case == "temporary":
        print(json.dumps(timing.temporary(device, int(wanted))))
        return
    kind = "amp" if case == "scaler" else case.removeprefix("after-")
    work = DeviceWork(int(wanted), device, kind, int(layers))
    timed = {"speed": timing.speed, "host": timing.host, "scaler": timing.scaler}
    if case in timed:
        print(json.dumps(timed[case](work, int(runs))))
    elif case.startswith("after-"):
        print(json.dumps(resumed(work)))
    else:
        until_killed(work)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
