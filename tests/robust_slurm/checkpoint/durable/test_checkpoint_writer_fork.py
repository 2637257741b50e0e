"""The writer's start and a training that forks data loader workers at the same moment.

A worker that is forked while the pipes of a starting process are open keeps them open: who waits
for their end then waits for the worker.
"""

from __future__ import annotations

import subprocess
import sys

STARTS = 25
SCRIPT = f"""
import os, sys, threading, time
from robust_slurm.checkpoint.store.disk.writing import WriterError, WriterProcess

workers = []
over = threading.Event()

def start_writers():
    for _ in range({STARTS}):
        writer = WriterProcess(["/bin/cat"])
        writer.start()
        os.kill(writer.pid, 9)  # and its end is seen, whoever was forked meanwhile
        try:
            writer.request({{"op": "write"}}, 20.0)
        except WriterError as error:
            assert "has ended" in str(error) or "no reason" in str(error), error
        writer.close()
    over.set()

threading.Thread(target=start_writers, daemon=True).start()
until = time.monotonic() + 100
while not over.wait(0.001) and time.monotonic() < until:
    pid = os.fork()
    if not pid:
        time.sleep(3600)  # a worker lives as long as the epoch of the data
        os._exit(0)
    workers.append(pid)
    if len(workers) > 30:
        os.kill(workers[0], 9)
        os.waitpid(workers.pop(0), 0)
for pid in workers:
    os.kill(pid, 9)
print("over" if over.is_set() else "hangs")
sys.stdout.flush()
os._exit(0)
"""


def test_a_worker_that_is_forked_meanwhile_hangs_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.stdout == "over\n", ran.stderr
