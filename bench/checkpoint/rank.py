"""A rank that dies, and the one after it: ``python -m bench.checkpoint.rank WHAT BYTES``.

``save``: trains and saves some steps, prints the last one and the crc of its state, and is killed.
``restore``: a fresh process; seconds of resume(), and of a memcpy of as many bytes beside it.
Both find their Store by ROBUST_CKPT_SOCKET.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from bench.checkpoint.work import Memcpy, Work
from robust_slurm import Checkpointer

STEPS = 4
COPIES = 5


def save(work: Work) -> dict[str, float]:
    checkpointer = Checkpointer(model=work.model, optimizer=work.optimizer)
    checkpointer.resume()
    for step in range(1, STEPS + 1):
        work.step()
        checkpointer.save(step)
    crc = work.crc()
    work.step()  # it waits until the snapshot is complete and replicated
    return {"step": step, "crc": crc, "nbytes": work.nbytes}


def restore(work: Work) -> dict[str, float | list[float]]:
    checkpointer = Checkpointer(model=work.model, optimizer=work.optimizer)
    began = time.perf_counter()
    step = checkpointer.resume()
    seconds = time.perf_counter() - began
    crc = work.crc()
    memcpy = Memcpy(work.nbytes)
    copies = [memcpy.seconds() for _ in range(COPIES)]
    new = [memcpy.new_seconds()]
    return {"step": step, "crc": crc, "seconds": seconds, "memcpy": copies, "memcpy_new": new}


def main(argv: list[str]) -> None:
    what, size = argv
    torch.set_num_threads(1)
    work = Work(int(size))
    print(json.dumps(save(work) if what == "save" else restore(work)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
