"""Native stacks by py-spy, of one process at a time, cancelled at once when anything else is due.

``py-spy dump --native`` stops the process while it reads it (0.01 to 0.04 s where torch is loaded;
0.2 s of work in all, most of it before): so it is for few processes, and for none that is stopped,
waits for a device, or is writing: a stop would cut the write short. It stops threads by
PTRACE_SEIZE and PTRACE_INTERRUPT: when py-spy dies, they go on.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_slurm.text import one_line
from srun_wrapper.agent.looking import dumps
from srun_wrapper.agent.looking.kernel import is_still, is_writing

SECONDS = 3.0  # for one process
GONE = 0.1  # s for a killed py-spy to end: what it traced goes on before it is a zombie
FRAMES = 16  # the innermost
WORD = 40  # characters of a function
FILE = 56  # characters of a file, the last ones
MEMORY = 512 << 20  # bytes that py-spy may allocate; the libraries that it maps do not count
_ADDRESS = re.compile(r"0x[0-9a-f]+$")


@dataclass(frozen=True, slots=True)
class NativeStack:
    """The native and Python frames of a main thread, or why there are none."""

    frames: tuple[str, ...] = ()
    failed: str = ""


def frames(dump: str, pid: int) -> tuple[str, ...]:
    """Return the main thread of ``py-spy dump --native --json``; () if it is no dump.

    Frames without a symbol are shown by their library, and only once in a row.
    """
    try:
        threads: list[dict[str, Any]] = json.loads(dump)
        main = next((t for t in threads if t.get("os_thread_id") == pid), None)
        if main is None:
            main = next(t for t in threads if t.get("thread_name") == "MainThread")
        found: list[str] = []
        for frame in main["frames"]:
            text = _frame(frame)
            if not found or found[-1] != text:
                found.append(text)
        return tuple(found[:FRAMES])
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return ()


def _frame(frame: dict[str, Any]) -> str:
    name = str(frame["name"])
    where = str(frame.get("short_filename") or Path(str(frame["filename"])).name)[-FILE:]
    line = int(frame["line"])
    if _ADDRESS.match(name):
        return one_line(where, FILE)
    place = one_line(where, FILE)
    return f"{one_line(name, WORD)} ({f'{place}:{line}' if line else place})"


class NativeReader:
    """Reads native stacks one after the other, in a thread; ``cancel`` ends that from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End py-spy, and return when the process that it reads goes on: a few ms."""
        with self._lock:
            self.cancelled = True
            if self._running is not None:
                self._running.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running.wait(GONE)

    def read(self, pid: int, seconds: float = SECONDS) -> NativeStack:
        tool = dumps.py_spy()
        if tool is None:
            return NativeStack(failed=dumps.NOT_INSTALLED)
        if is_still(pid):
            return NativeStack(failed="one of its threads is stopped or waits for a device")
        if is_writing(pid):
            return NativeStack(failed="it is writing, and must not be stopped in that")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with self._lock:
                if self.cancelled:
                    return NativeStack(failed="cancelled")
                try:
                    running = subprocess.Popen(
                        [tool, "dump", "--json", "--native", "--pid", str(pid)],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                    )
                except OSError as error:
                    return NativeStack(failed=f"py-spy cannot be started: {error.strerror}")
                self._running = running
            _restrict(running.pid)
            until = time.monotonic() + seconds
            while running.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
            with self._lock:
                self._running = None
                late = running.poll() is None
                if late:
                    running.kill()
            if late or self.cancelled:
                return NativeStack(failed=f"py-spy had no answer within {seconds:g} s")
            out.seek(0)
            found = frames(out.read(dumps.LONGEST).decode(errors="replace"), pid)
            err.seek(0)
            message = err.read(4096).decode(errors="replace")
            return NativeStack(found) if found else NativeStack(failed=dumps.why(message))


def _restrict(pid: int) -> None:
    """Let py-spy fail, or be killed, before it takes the ranks' memory."""
    with contextlib.suppress(OSError, ValueError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
