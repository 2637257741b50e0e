"""The process that has pyslurm: started when needed, asked with deadlines, killed at them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_slurm.text import one_line

# Isolated: neither the working directory nor PYTHONPATH says which pyslurm is imported.
COMMAND = (sys.executable, "-I", str(Path(__file__).with_name("pyslurm_child.py")))
START_S = 5.0  # Python and pyslurm may lie on a slow file system
_REAP_S = 0.5
_MOST = 1 << 28  # bytes of an answer
_SAID = 400  # characters of its standard error
_LIBRARY = "Slurm's library ended the process: "


class ChildLost(Exception):
    """The process could not be started, died, or answered nonsense. The text says which."""


class ChildLate(ChildLost):
    """No answer at the deadline: the process was killed, its order may have been carried out."""


class PyslurmRefusal(Exception):
    """Slurm's own words why it did not do what pyslurm asked for."""


class PyslurmChild:
    """One process, used by one thread at a time. Once lost it stays lost; once late, it is started
    again for the next question."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.version = ""  # of pyslurm, once the process runs
        self._argv = list(argv)
        self._environ = dict(environ)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said = -1  # the file of its standard error; a pipe could fill up
        self._rest = b""
        self._why = ""  # the process is lost for

    @property
    def running(self) -> bool:
        """True if the process was started and has not been lost."""
        return self._process is not None and bool(self.version)

    def start(self, until: float) -> None:
        """Start the process if it does not run. Raises ChildLost."""
        with self._entered(until):
            self._start(until)

    def ask(self, request: Mapping[str, Any], until: float) -> Any:
        """Return the answer's value. Raises PyslurmRefusal, ChildLost."""
        line = json.dumps(request).encode() + b"\n"
        with self._entered(until):
            process = self._start(until)
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError:
                raise self._lose("") from None
            answer = self._read(until)
        if "slurm_error" in answer:
            raise PyslurmRefusal(str(answer["slurm_error"]))
        if "value" not in answer:
            raise ChildLost(str(answer.get("error")))
        return answer["value"]

    def close(self) -> None:
        """End the process; another question starts it again."""
        with self._lock:
            self._end()

    # ---- inside; the lock is held

    def _entered(self, until: float) -> _Entered:
        return _Entered(self._lock, until)

    def _start(self, until: float) -> subprocess.Popen[bytes]:
        if self._why:
            raise ChildLost(self._why)
        if self._process is not None:
            return self._process
        self._said = os.memfd_create("pyslurm")
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=self._environ,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise self._lose(f"{self._argv[0]} cannot be started: {error}") from None
        try:
            hello = self._read(min(until, time.monotonic() + START_S))
        except ChildLate:
            raise self._lose(f"it did not start within {START_S:g} s") from None
        if "value" not in hello:
            raise self._lose(str(hello.get("error")))
        self.version = str(hello["value"]["pyslurm"])
        return self._process

    def _read(self, until: float) -> dict[str, Any]:
        """Return the next line, as JSON."""
        process = self._process
        assert process is not None and process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        parts = [self._rest]
        size = 0
        while b"\n" not in parts[-1]:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                self._end()
                raise ChildLate("pyslurm did not answer in time, and its process was killed")
            part = os.read(fd, 1 << 20)
            size += len(part)
            if not part or size > _MOST:
                raise self._lose("")
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._lose("its answer is not JSON")
        return answer

    def _lose(self, why: str) -> ChildLost:
        """Kill the process. Without a reason the last of what it printed is the reason."""
        self._why = why or self._last_words() or "it died"
        self._end()
        return ChildLost(self._why)

    def _last_words(self) -> str:
        end = os.fstat(self._said).st_size
        said = one_line(os.pread(self._said, _SAID, max(0, end - _SAID)).decode("utf-8", "replace"))
        return f"{_LIBRARY}{said}" if said else ""

    def _end(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if self._said >= 0:
            os.close(self._said)
            self._said = -1
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was not written yet
                    pass
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it hangs in the kernel: SIGKILL ends it when it can
            pass


class _Entered:
    """The lock, or ChildLate at the deadline: another thread's question may take long."""

    def __init__(self, lock: threading.Lock, until: float) -> None:
        self._lock = lock
        self._until = until

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=max(0.0, self._until - time.monotonic())):
            raise ChildLate("another question took until the deadline")

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
