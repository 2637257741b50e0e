"""Steps, and a save at each signal: saver.py STEPS [SECONDS of a wait at the middle]."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import here  # type: ignore[import-not-found]

steps, wait = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
here.started()


def save(*_: object) -> None:
    """Write a note."""
    Path(f"saved.{here.RANK}").write_text("saved")


signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGUSR2, save)
for step in range(steps):
    time.sleep(0.05)
    if step == steps // 2:
        time.sleep(wait)
print(f"rank {here.RANK} is done")
