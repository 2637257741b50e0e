"""A launcher with two ranks and a worker of a loader each, as torchrun and torch would have them.

``rank``: one of the ranks; without: a launcher of both. Each writes its pid when it is ready.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import robust_slurm

directory = Path(sys.argv[1])


def ready(name: str) -> None:
    (directory / f"{name}.new").write_text(str(os.getpid()))
    (directory / f"{name}.new").rename(directory / name)


def fetch() -> None:
    ready(f"loader-{os.environ['RANK']}")
    time.sleep(600)


def _worker_loop() -> None:
    fetch()


def all_reduce() -> None:
    ready(f"rank-{os.environ['RANK']}")
    time.sleep(600)


def helper() -> None:
    time.sleep(600)


def rank() -> None:
    robust_slurm.beat(1)
    if os.fork() == 0:
        _worker_loop()
    threading.Thread(target=helper, name="helper", daemon=True).start()
    all_reduce()


def launcher() -> None:
    for number in (2, 3):
        place = {"RANK": str(number), "LOCAL_RANK": str(number - 2), "WORLD_SIZE": "4"}
        environ = os.environ | place | {"TORCHELASTIC_RUN_ID": "none"}
        subprocess.Popen([sys.executable, __file__, str(directory), "rank"], env=environ)
    signal.pause()


rank() if sys.argv[2:] == ["rank"] else launcher()
