"""Keeps data processes as robust-task does, with its code.

``python -m bench.data.process DIR``.

Ranks with ROBUST_BEAT_DIR=DIR find it. Deaths have no limit here: they are the benchmark's own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from bench.common import REPOSITORY, BenchError
from bench.data.child import tree
from srun_wrapper.agent.data import data_process, door
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting

STARTS_WITHIN = 60.0


class Kept:
    """The process that keeps them, from the benchmark's side."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self.environ = {"ROBUST_BEAT_DIR": str(directory)}
        argv = [sys.executable, "-m", "bench.data.process", str(directory)]
        self._process = subprocess.Popen(argv, cwd=REPOSITORY, start_new_session=True)
        self.pid = self._process.pid
        until = time.monotonic() + STARTS_WITHIN
        while not (directory / door.NAME).exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise BenchError("the process that keeps data processes does not start")
            time.sleep(0.02)

    def below(self) -> list[int]:
        """Return the data processes, and what they have started."""
        return tree([self.pid])[1:]

    def kill(self) -> None:
        """Kill the data process as a fault would. Raises BenchError if there is none."""
        until = time.monotonic() + STARTS_WITHIN
        while not (pids := data_processes(self.below())):  # the one before has just been killed
            if time.monotonic() > until:
                raise BenchError("no data process is there to be killed")
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    def close(self) -> None:
        """End all of it."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # it may be stopped
        try:
            self._process.wait(10.0)
        finally:
            self._process.kill()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def data_processes(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that are data processes and have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            name = (Path("/proc") / str(pid) / "cmdline").read_bytes()
            if name.rstrip(b"\0").endswith(b"data/service/main.py"):
                found.append(pid)
    return found


def shared_mb(pids: Iterable[int]) -> float:
    """Return the size of the memory files that processes have open, each counted once.

    Pages that are mapped as well are in the processes' own memory (PSS), too: counted twice.
    """
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if str(fd.readlink()).startswith("/memfd:"):
                    status = fd.stat()
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values()) / 1e6


def main(directory: Path) -> None:
    """Keep until SIGTERM."""
    data_process.WITHIN = 0.0
    loop = Loop()
    made = door.DataDoor(loop, directory, secrets.token_bytes(32))
    loop.on_signals([signal.SIGTERM], lambda _: loop.stop())
    loop.on_signals([signal.SIGCHLD], lambda _: starting.reaped(process_tree.reap()))
    try:
        loop.run()
    finally:
        made.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
