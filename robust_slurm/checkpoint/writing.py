"""The durable tier from the store's side: one writer process and one thread per rank.

The writer (``python -m robust_slurm.checkpoint.writer``) runs in the user's interpreter, because
the durable format is torch's. It is asked one thing at a time, a JSON object a line, and must
answer within a deadline; one that died or hangs is ended, and the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import threading
import time
from typing import Any

from robust_slurm.auto import HOOK_DIR

MAX_ANSWER = 16 << 20
_TAIL = 600
_LOOK = 0.5  # s between two looks whether the store is closing
_HIDDEN = ("ROBUST_BEAT_DIR", "ROBUST_CKPT_SOCKET")


class WriterError(Exception):
    """The writer did not do it; the text says why."""


class _EndedError(Exception):
    """The writer has ended by itself."""


def writer_environment() -> dict[str, str]:
    """So that the user's interpreter finds robust_slurm, and the writer is no rank."""
    env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    paths = [HOOK_DIR, env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["ROBUST_AUTO"] = "0"
    return env


class Writer:
    """``command``: how to start it. ``request`` from one thread; ``close`` from any."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._busy = threading.Lock()  # held during a request
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = -1
        self._asked = 0
        self._closed = False

    @property
    def pid(self) -> int:
        """0 when none runs."""
        with self._lock:
            return self._process.pid if self._process is not None else 0

    def request(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Ask, wait at most ``deadline`` s. Raises WriterError, also for its ``failed``.

        A writer that ends meanwhile (it may get the signals of the job) is replaced once.
        """
        until = time.monotonic() + deadline
        with self._busy:
            try:
                answer = self._ask(message, until)
            except _EndedError:
                try:
                    answer = self._ask(message, until)
                except _EndedError as err:
                    raise WriterError(str(err)) from None
        if answer.get("op") == "failed":
            raise WriterError(str(answer.get("why", "the writer gave no reason"))[:2000])
        return answer

    def _ask(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        self._asked += 1
        try:
            process.stdin.write(json.dumps({**message, "id": self._asked}).encode() + b"\n")
            process.stdin.flush()
            return self._answer(process, until)
        except OSError as err:
            raise _EndedError(self._end(f"the writer has ended ({err.strerror})")) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        if self._busy.acquire(timeout=2 * _LOOK):  # a request sees it and ends
            self._end("")
            if self._errors >= 0:
                os.close(self._errors)
                self._errors = -1
            self._busy.release()

    # -- inside

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise WriterError("the store is closing")
            if self._process is None:
                if self._errors < 0:
                    self._errors = os.memfd_create("writer-errors", os.MFD_CLOEXEC)
                try:
                    self._process = subprocess.Popen(
                        self._command, env=writer_environment(), stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
                    )  # fmt: skip
                except (OSError, ValueError) as err:
                    raise WriterError(f"cannot start {self._command[0]!r}: {err}") from None
            return self._process

    def _answer(self, process: subprocess.Popen[bytes], until: float) -> dict[str, Any]:
        """Raises WriterError when it is too late, OSError when the writer has ended."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        line = bytearray()
        while (left := until - time.monotonic()) > 0 and not self._closed:
            if not poll.poll(min(left, _LOOK) * 1000):
                continue
            got = os.read(fd, 1 << 16)
            if not got:
                raise BrokenPipeError(errno.EPIPE, "it closed its output")
            line += got
            while (end := line.find(b"\n")) >= 0:
                answer = _parse(bytes(line[:end]))
                if answer is not None and answer.get("id") == self._asked:
                    return answer
                del line[: end + 1]
            if len(line) > MAX_ANSWER:
                break
        why = "the store is closing" if self._closed else "the writer does not answer"
        raise WriterError(self._end(why))

    def _end(self, why: str) -> str:
        """End the process. Returns ``why`` with the last words of its stderr."""
        with self._lock:
            process, self._process = self._process, None
            errors = self._errors
        if process is None:
            return why
        with contextlib.suppress(OSError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: left behind
            process.wait(1.0)
        if errors >= 0:
            with contextlib.suppress(OSError):
                size = os.fstat(errors).st_size
                words = os.pread(errors, _TAIL, max(0, size - _TAIL)).decode(errors="replace")
                os.ftruncate(errors, 0)
                os.lseek(errors, 0, os.SEEK_SET)
                if words.strip():
                    why = f"{why}: …{words.strip()}"
        return why


def _parse(line: bytes) -> dict[str, Any] | None:
    """An answer; None for anything else that a library prints."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("op"), str) else None
