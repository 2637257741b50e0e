"""The process that imports pyslurm: started when needed, asked with a deadline, killed at it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from robust_slurm.text import one_line

# Isolated: neither the working directory nor PYTHONPATH says which pyslurm is imported.
COMMAND = (sys.executable, "-I", str(Path(__file__).with_name("pyslurm_child.py")))
START_S = 5.0  # Python and pyslurm may lie on a slow file system
_REAP_S = 0.5
_MOST = 1 << 26  # bytes of an answer: some 250,000 nodes
_KEPT = 1 << 16  # bytes kept of what it prints to standard error about one question
_SAID = 400  # characters of its standard error that are shown


class ChildLost(Exception):
    """The process could not be started, died, or answered nonsense. The text says which.

    ``sent``: the request may have reached it, so an order may have been carried out.
    """

    sent = False


class ChildLate(ChildLost):
    """The deadline has passed. A process that owed an answer was killed."""


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
        self._number = 0  # of the last question: its answer has the same
        self._why = ""  # the reason why the process is lost

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
        with self._entered(until):
            process = self._start(until)
            if until <= time.monotonic():
                raise ChildLate("no time was left to ask pyslurm")
            self._number += 1
            line = json.dumps({**request, "number": self._number}).encode() + b"\n"
            os.lseek(self._said, 0, os.SEEK_SET)  # keep only what it prints about this question
            try:
                self._write(process, line, until)
                answer = self._read(process, until)
                if answer.get("number") != self._number:
                    raise self._lose("its answer is to another question")
            except ChildLost as error:
                error.sent = True
                raise
            except BaseException:  # else this answer would be taken for that of the next question
                self._end()
                raise
        if "slurm_error" in answer:
            raise PyslurmRefusal(str(answer["slurm_error"]))
        if "value" not in answer:
            failed = ChildLost(_told(answer))
            failed.sent = True
            raise failed
        return answer["value"]

    def close(self) -> None:
        """End the process; another question starts it again."""
        with self._lock:
            self._end()

    # ---- inside; the lock is held

    @contextmanager
    def _entered(self, until: float) -> Iterator[None]:
        """Hold the lock. Raises ChildLate if another thread's question holds it until then."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise ChildLate("another question took until the deadline")
        try:
            yield
        finally:
            self._lock.release()

    def _start(self, until: float) -> subprocess.Popen[bytes]:
        if self._why:
            raise ChildLost(self._why)
        if self._process is not None:
            if self._process.poll() is not None:  # killed for its memory, perhaps: nothing was sent
                raise self._lose("")
            return self._process
        latest = time.monotonic() + START_S
        try:
            self._said = _bounded_file(_KEPT)
            process = subprocess.Popen(
                self._argv,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=self._environ,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise self._lose(f"{self._argv[0]} cannot be started: {error}") from None
        self._process = process
        try:
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            hello = self._read(process, min(until, latest))
        except ChildLate:
            if until < latest:  # the caller had less time than that
                raise
            raise self._lose(f"it did not start within {START_S:g} s") from None
        except ChildLost:
            raise
        except BaseException:
            self._end()
            raise
        value = hello.get("value")
        if not isinstance(value, dict) or "pyslurm" not in value:
            raise self._lose(_told(hello))
        self.version = one_line(str(value["pyslurm"]), 40)
        return process

    def _write(self, process: subprocess.Popen[bytes], line: bytes, until: float) -> None:
        assert process.stdin is not None
        fd = process.stdin.fileno()
        left = memoryview(line)
        while left:
            self._wait(fd, select.POLLOUT, until)
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._lose("") from None

    def _read(self, process: subprocess.Popen[bytes], until: float) -> dict[str, Any]:
        """Return the next line, as JSON."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        parts = [self._rest]
        size = len(self._rest)
        while b"\n" not in parts[-1]:
            self._wait(fd, select.POLLIN, until)
            part = os.read(fd, 1 << 20)
            if not part:
                raise self._lose("")
            size += len(part)
            if size > _MOST:
                raise self._lose(f"its answer is larger than {_MOST >> 20} MiB")
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._lose("its answer is not JSON")
        return answer

    def _wait(self, fd: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            self._end()
            raise ChildLate("pyslurm did not answer in time, and its process was killed")

    def _lose(self, why: str) -> ChildLost:
        """Kill the process. Without ``why``, its exit and its last output are the reason."""
        self._why = why or self._end_of_it()
        self._end()
        return ChildLost(self._why)

    def _end_of_it(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            how = "its process closed its output"
        else:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            how = f"its process ended with {how}"
        end = os.lseek(self._said, 0, os.SEEK_CUR)
        begin = max(0, end - _SAID)
        said = one_line(os.pread(self._said, end - begin, begin).decode("utf-8", "replace"))
        return f"{how}: {said}" if said else how

    def _end(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if self._said >= 0:
            os.close(self._said)
            self._said = -1
        if process is None:
            return
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it hangs in the kernel: SIGKILL ends it when it can
            pass


def _told(answer: Mapping[str, Any]) -> str:
    return one_line(str(answer.get("error", "its answer has no value")))


def _bounded_file(size: int) -> int:
    """Return a file in memory that takes ``size`` bytes and refuses more."""
    file = os.memfd_create("pyslurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return file
