"""Facts that a node knows about the end of a rank: OOM kills, kernel log, torch's error file.

A source that is absent or forbidden contributes nothing. All text is as untrusted as a rank's
output, so it is read up to a limit and cleaned.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from robust_slurm.text import one_line
from srun_wrapper.decide.failure import OF_THIS_JOB

KMSG = Path("/dev/kmsg")
CGROUPS = Path("/sys/fs/cgroup")
LINES = 6  # of the kernel
NAMED = 4  # processes that the rank's output names
TEXT = 300  # characters of one fact
READ_S = 0.1  # s for the kernel's log
READ_BYTES = 4 << 20  # of the kernel's log; its buffer is mostly smaller
FILE_BYTES = 64 << 10  # of torch's error file
# A driver's error that names no process is a fact about an end that follows within this time.
RECENT_S = 120.0
# Slurm names a job's cgroup by its number; from 26.05 on by its SLUID (cgroup/v2, by default).
_STEP = re.compile(r"(?:/job_\d+|slurmstepd\.scope/s[0-9A-HJKMNP-TV-Z]{13})/(.*/)?step_[^/]+")
_HOLDS = re.compile(r"\bProcess (\d{1,9}) has [\d.]+ \w+ memory in use")  # as torch writes it
_NAMED = re.compile(r"\bpid[ =:']{1,3}(\d+)", re.IGNORECASE)


class RankFacts:
    """Watches what a node records of one rank. ``begin``, ``gather`` and ``close`` may wait."""

    def __init__(
        self,
        pid: int,
        error_file: Path,
        *,
        kmsg: Path = KMSG,
        cgroups: Path = CGROUPS,
        proc: Path = Path("/proc"),
    ) -> None:
        """``error_file``: where torch writes an exception, if it does."""
        self._pid = pid
        self._error_file = error_file
        self._kmsg = kmsg
        self._cgroups = cgroups
        self._proc = proc
        self._cgroup = ""
        self._counter: Path | None = None
        self._lock = threading.Lock()
        self._kills: int | None = None  # OOM kills before this rank's start
        self._log = -1
        self._closed = False

    def begin(self) -> None:
        """Note the state before the rank can fail."""
        with self._lock:
            if self._closed:
                return
            self._cgroup, self._counter = _oom_counter(
                self._cgroups, self._proc / "self" / "cgroup"
            )
            self._kills = _oom_kills(self._counter)
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self._log = os.open(self._kmsg, flags)
                os.lseek(self._log, 0, os.SEEK_END)
            except OSError:
                pass  # many sites forbid it

    def gather(self, tail: str = "", *, killed: bool = True) -> tuple[str, ...]:
        """Return what was recorded since ``begin``, one line each, and close.

        ``tail``: of the rank's output. ``killed``: SIGKILL may have ended the rank. Only then do
        the kernel's lines about OOM kills of other processes in the cgroup count.
        """
        with self._lock:
            kernel = self._kernel(time.monotonic(), self._cgroup if killed else "")
            found = [*kernel, *self._named(tail), self._error()]
        self.close()
        return tuple(one_line(text, TEXT) for text in found if text)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    def oom_kill(self) -> tuple[str, ...]:
        """Return the line that says how many OOM kills the cgroup had since ``begin``, or none.

        It does not wait. Only of a rank that SIGKILL ended does the line say why: a kill of another
        process of the cgroup hours ago is no reason for another end.
        """
        now = _oom_kills(self._counter)
        if self._kills is None or now is None or now <= self._kills:
            return ()
        text = f"oom_kill events since the rank's start: {now - self._kills}"
        return (one_line(f"cgroup {self._cgroup}: {text}", TEXT),)

    def _kernel(self, now: float, cgroup: str) -> list[str]:
        if self._log < 0:
            return []
        lines = _read_log(self._log, now + READ_S).decode(errors="replace").splitlines()
        found = kernel_lines(lines, self._pid, cgroup, now)
        return [f"kernel: {text}" for text in found[:LINES]]

    def _named(self, tail: str) -> list[str]:
        """Return which of the processes that hold GPU memory are ranks of this job."""
        ours = b"ROBUST_BEAT_DIR=" + os.fsencode(self._error_file.parent) + b"\0"
        pids = list(dict.fromkeys(_HOLDS.findall(tail)))[-NAMED:]
        return [
            f"process {pid} {OF_THIS_JOB}"
            for pid in pids
            if ours in _small_file(self._proc / pid / "environ") + b"\0"
        ]

    def _error(self) -> str:
        return error_message(_small_file(self._error_file))


def kernel_lines(lines: Iterable[str], pid: int, cgroup: str, now: float) -> list[str]:
    """Return the kernel's own texts about a process or its cgroup, or about a GPU (pure).

    ``lines``: as /dev/kmsg has them; ``now``: monotonic seconds, as the kernel's times are.
    """
    process = re.compile(rf"(?:\bpid[ =:']{{1,3}}|\bprocess |\[|:){pid}(?!\d)", re.IGNORECASE)
    memory = re.compile(rf"task_memcg={re.escape(cgroup)}[,/]")
    found = dict[str, None]()
    for line in lines:
        head, mark, text = line.partition(";")
        fields = head.split(",")
        # Facility 0 is the kernel; what a program writes into /dev/kmsg gets another one.
        if not mark or len(fields) < 4 or not all(f.isdecimal() for f in fields[:3]):
            continue
        if int(fields[0]) >= 8:
            continue
        own = process.search(text) or (cgroup and memory.search(text))
        recent = now - int(fields[2]) / 1e6 <= RECENT_S
        if own or ("NVRM" in text and recent and not _NAMED.search(text)):
            found[text] = None
    return list(found)


def error_message(raw: bytes) -> str:
    """Return the exception in torch's error file; "" for anything else (pure)."""
    try:
        message = json.loads(raw)["message"]
        if isinstance(message, dict):
            message = message["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    return message if isinstance(message, str) else ""


def _oom_counter(cgroups: Path, own: Path) -> tuple[str, Path | None]:
    """Return the cgroup of this task, and the file that counts its OOM kills.

    Only a cgroup of a job's step counts: another would count other jobs' kills as well. (A limit
    that was hit, memory.failcnt, is no kill: the page cache hits it as well.)
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return "", None
    mine = ""
    for _number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"
        root = cgroups / "memory" if controllers else cgroups
        while _STEP.search(path):
            mine = mine or path
            file = root / path.lstrip("/") / name
            if _oom_kills(file) is not None:
                return path, file
            path = path.rpartition("/")[0]
    return mine, None


def _oom_kills(counter: Path | None) -> int | None:
    """Return the count in memory.events (v2) or memory.oom_control (v1); None if unknown."""
    try:
        text = counter.read_text() if counter is not None else ""
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _read_log(fd: int, until: float) -> bytes:
    parts, size = list[bytes](), 0
    while size < READ_BYTES and time.monotonic() < until:
        try:
            part = os.read(fd, 8192)  # of the device one record
        except OSError as err:
            if err.errno == errno.EPIPE:  # records were overwritten: the next read goes on
                continue
            break
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _small_file(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError:
        return b""
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > FILE_BYTES:
            return b""
        return os.read(fd, FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
