"""The GPUs' error counters, read by a process of its own: NVML may hang, even in the kernel.

When the slot ends the processes below it, it neither kills this one nor waits for it: it belongs to
no rank and must not delay a stop. If it cannot be killed it is left, and NVML is not asked again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from robust_slurm import commands
from robust_slurm.error_counters import LARGEST
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.starting import Starting

SECONDS = 10.0  # s for NVML to answer: without a persistent driver it starts the GPUs first
GONE = 1.0  # s for the process to end when it is killed
WORKER = "health.nvidia.nvml_counters"
DRIVER = Path("/proc/driver/nvidia/version")
WORD = 120  # characters of a name
_MOST = 1 << 20  # bytes of all answers
_log = logging.getLogger("robust-task")
_Found = dict[str, int]

_starts: list[Starting[_Found]] = []


def processes() -> list[int]:
    """Return the processes that read GPUs now, or were left behind."""
    return [start.pid for start in _starts if start.pid]


class GpuReader:
    """``command``: the process that reads, see ``health/nvidia/nvml_counters.py``."""

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str] = (*commands.own_python(), "-I", *commands.own_words(WORKER)),
        driver: Path = DRIVER,
        seconds: float = SECONDS,
    ) -> None:
        self._loop = loop
        self._command = command
        self._driver = driver
        self._seconds = seconds
        self.left_behind = False

    def read(self, got: Callable[[_Found], None]) -> None:
        """Give what can be read to ``got``, in the loop; {} where there is no driver."""
        if self.left_behind or not self._driver.exists():
            self._loop.call(lambda: got({}))
            return

        def done(found: _Found, _status: int | None = None) -> None:
            if not self.left_behind:
                _starts.remove(start)
            got(found)

        start = Starting(self._loop, self._collect, done, lambda _error: done({}))
        _starts.append(start)

    # -- in the thread of the start

    def _collect(self, start: Starting[_Found]) -> _Found:
        out, their_out = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                pid = start.popen(
                    self._command,
                    os.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=their_out,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                ).pid
            finally:
                os.close(their_out)
            found: _Found = {}
            late = False
            try:
                for line in _lines(out, time.monotonic() + self._seconds):
                    late = line is None
                    if line is None or not (counters := parse(line)):
                        break
                    found |= counters
            finally:
                self._end(pid, late)
        finally:
            os.close(out)
        return found

    def _end(self, pid: int, late: bool) -> None:
        if not _ended(pid):
            process_tree.send([pid], signal.SIGKILL)
        until = time.monotonic() + GONE
        while not _ended(pid) and time.monotonic() < until:
            time.sleep(0.005)
        self.left_behind = not _ended(pid)
        if late or self.left_behind:
            more = "and cannot be killed; GPUs are not read any more" if self.left_behind else ""
            _log.warning(f"NVML gave no answer within {self._seconds:g} s {more}".rstrip())


def _ended(pid: int) -> bool:
    """True once a child has ended, whether the loop has reaped it or not."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _lines(fd: int, until: float) -> Iterator[bytes | None]:
    """Yield the whole lines that come, until their end; None: the time is over."""
    rest, size = b"", 0
    while size < _MOST:
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            yield None
            return
        data = os.read(fd, 1 << 16)
        if not data:
            return
        size += len(data)
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def parse(line: bytes) -> _Found:
    """Return one GPU's counters; {} for the last line, and for what is none. Pure."""
    try:
        counters = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(counters, dict):
        return {}
    return {
        name[:WORD]: value
        for name, value in counters.items()
        if name.isascii() and name.isprintable() and type(value) is int and 0 <= value <= LARGEST
    }
