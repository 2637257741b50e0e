"""The durable tier from the store's side: one writer process and one thread per rank.

The writer (``checkpoint/durable/writer.py``) runs in the user's interpreter, because
the durable format is torch's. It is asked in JSON objects, one a line, and must answer each within
a deadline, in any order; one that died or hangs is ended, and the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from robust_slurm.auto import HOOK_DIR
from robust_slurm.frames import json_lines

MAX_ANSWER = 16 << 20
_TAIL = 600
_REQUEST = 1 << 20  # bytes of the largest request; 64 KiB unless asked for
_LOOK = 0.5  # s between two looks whether the store is closing
_HIDDEN = ("ROBUST_BEAT_DIR", "ROBUST_CKPT_SOCKET")
_FORK_WAIT = 10.0  # s that a fork waits for a writer that starts: exec may wait for a file system


class _ForkLock:
    """Held while a process starts: a fork of this process waits for it.

    Outside robust-srun the store is in the training, which forks data loader workers. One forked
    while the pipes of a starting process are open inherits them and keeps them open, and Popen
    waits for their end for as long as the worker lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks = threading.local()
        os.register_at_fork(
            before=self._before, after_in_parent=self._after, after_in_child=self._in_child
        )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._forks.hold = self._lock.acquire(timeout=_FORK_WAIT)

    def _after(self) -> None:
        if self._forks.hold:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()


_no_fork = _ForkLock()


class WriterError(Exception):
    """The writer did not do it; the text says why."""


class _EndedError(Exception):
    """The writer has ended by itself."""


class _Answers:
    """The answers of one process: a thread reads them and hands each to its asker."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._change = threading.Condition()
        self._came: dict[int, dict[str, Any]] = {}
        self._over = False
        threading.Thread(target=self._read, name="ckpt-writer", daemon=True).start()

    def wait(self, number: int, until: float, closed: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the answer; None when it is too late, or ``closed``. Raises _EndedError."""
        with self._change:
            while number not in self._came:
                left = until - time.monotonic()
                if left <= 0 or closed():
                    return None
                if self._over:
                    raise _EndedError
                self._change.wait(min(left, _LOOK))
            return self._came.pop(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        line = bytearray()
        with contextlib.suppress(OSError, ValueError):
            while got := os.read(self._process.stdout.fileno(), 1 << 16):
                line += got
                while (end := line.find(b"\n")) >= 0:
                    self._take(bytes(line[:end]))
                    del line[: end + 1]
                if len(line) > MAX_ANSWER:
                    break
        with self._change:
            self._over = True
            self._change.notify_all()

    def _take(self, line: bytes) -> None:
        try:
            answer = json_lines.parse(line)
        except ValueError:  # something else, which a library prints
            return
        if isinstance(number := answer.get("id"), int):
            with self._change:
                self._came[number] = answer
                self._change.notify_all()


def writer_environment() -> dict[str, str]:
    """Return an environment in which the user's Python finds robust_slurm and is no rank."""
    env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    paths = [HOOK_DIR, env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["ROBUST_AUTO"] = "0"
    return env


class WriterProcess:
    """The writer, started by ``command`` when needed; call all methods from any thread."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # held while one starts: exec may wait for a file system
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: _Answers | None = None
        self._errors = -1
        self._asked = 0
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of the writer; 0 when none runs."""
        with self._lock:
            return self._process.pid if self._process is not None else 0

    def request(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return its answer, within ``deadline`` s. Raises WriterError.

        A writer that ends meanwhile is replaced once.
        """
        until = time.monotonic() + deadline
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

    def start(self) -> None:
        """Start the writer before its first request. Raises WriterError."""
        self._running()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that needs no answer, if the writer runs."""
        with self._lock:
            stdin = self._process.stdin if self._process is not None else None
            if stdin is not None:
                with contextlib.suppress(OSError, ValueError):
                    stdin.write(json_lines.encode(message))
                    stdin.flush()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            self._end(process, "")
        with self._lock:
            if self._errors >= 0:
                os.close(self._errors)
                self._errors = -1

    # -- inside

    def _ask(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        process, answers = self._running()
        with self._lock:
            self._asked += 1
            number = self._asked
            assert process.stdin is not None
            try:  # a line is shorter than the pipe's buffer: this does not block
                process.stdin.write(json_lines.encode({**message, "id": number}))
                process.stdin.flush()
            except (OSError, ValueError):
                pass  # the reading thread notices the end
        try:
            answer = answers.wait(number, until, lambda: self._closed)
        except _EndedError:
            raise _EndedError(self._end(process, "the writer has ended")) from None
        if answer is None:
            closed = "the store is closing" if self._closed else ""
            raise WriterError(closed or self._end(process, "the writer does not answer"))
        return answer

    def _running(self) -> tuple[subprocess.Popen[bytes], _Answers]:
        with self._starting:
            with self._lock:
                if self._closed:
                    raise WriterError("the store is closing")
                if self._process is not None and self._answers is not None:
                    return self._process, self._answers
                if self._errors < 0:
                    self._errors = os.memfd_create("writer-errors", os.MFD_CLOEXEC)
                errors = self._errors
            try:
                with _no_fork:
                    process = subprocess.Popen(
                        self._command, env=writer_environment(), stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                    )  # fmt: skip
            except (OSError, ValueError) as err:
                raise WriterError(f"cannot start {self._command[0]!r}: {err}") from None
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # else the digests of a large snapshot fill it
                fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _REQUEST)
            answers = _Answers(process)
            with self._lock:
                self._process, self._answers, closed = process, answers, self._closed
        if closed:
            self._end(process, "")
            raise WriterError("the store is closing")
        return process, answers

    def _end(self, process: subprocess.Popen[bytes], why: str) -> str:
        """End this process. Returns ``why`` with the last words of its stderr."""
        with self._lock:
            if self._process is process:
                self._process = self._answers = None
            errors = self._errors
            with contextlib.suppress(OSError):
                process.kill()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: left behind
                process.wait(1.0)
            if errors >= 0:
                with contextlib.suppress(OSError):
                    size = os.fstat(errors).st_size
                    words = os.pread(errors, _TAIL, max(0, size - _TAIL)).decode(errors="replace")
                    if words.strip():
                        why = f"{why}: …{words.strip()}"
        return why
