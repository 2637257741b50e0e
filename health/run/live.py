"""The live node: the interface of health/node/system.py, implemented on this machine."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from health.node import kmsg
from health.node.gpu_snapshot import GpuSnapshot
from health.node.probe import probe, run
from health.node.stuck import Stuck
from health.node.system import (
    READ_LIMIT,
    CommandOutput,
    Context,
    Disk,
    Event,
    LogRecord,
    PathEntry,
    Usage,
)
from health.nvidia.nvml import Collector, driver_loaded
from health.settings import Settings

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
}
_STA_UNSYNC = 0x40  # linux/timex.h
_STA_NANO = 0x2000


def context(where: str, env: Mapping[str, str], node: str = "") -> Context:
    """Read the context of the run from the environment that slurmd gave."""
    own = {key: value for key, value in env.items() if key.startswith(("SLURM_", "SLURMD_"))}
    return Context(
        where=where,
        node=node or own.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
        job=_number(own.get("SLURM_JOB_ID", own.get("SLURM_JOBID", "")), 0),
        uid=_number(own.get("SLURM_JOB_UID", ""), -1),
        env=own,
    )


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() else otherwise


class LiveSystem:
    """One look at this node: the time is taken once, NVML is asked once."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self.settings = settings
        self.context = context
        self._collector: Collector | None = None
        self._snapshot: GpuSnapshot | None = None
        self._log: list[LogRecord] | None = None
        self._boot_id = self.read("/proc/sys/kernel/random/boot_id").strip()
        self._now = time.time()
        self._uptime = float(self.read("/proc/uptime").split()[0])
        self.stuck = Stuck()

    def options(self, family: str) -> Mapping[str, Any]:
        return self.settings.options(family)

    def read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            parts = []
            left = READ_LIMIT
            while left > 0 and (part := os.read(fd, min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
        except OSError as err:
            raise OSError(err.errno, err.strerror, path) from None
        finally:
            os.close(fd)
        return b"".join(parts).decode("utf-8", "replace")

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path))  # noqa: PTH208

    def link(self, path: str) -> str:
        return os.readlink(path)  # noqa: PTH115

    def entry(self, path: str) -> PathEntry:
        info = os.lstat(path)
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "file")
        mode = stat.S_IMODE(info.st_mode)
        return PathEntry(kind, mode, info.st_uid, info.st_size, info.st_mtime)

    def usage(self, tops: Sequence[str], deadline_s: float) -> Usage:
        from health.node.leftover_files import add_unlinked, walk
        from health.node.mountinfo import visible

        try:
            points = frozenset(visible(self.read("/proc/self/mountinfo")))
        except FileNotFoundError:
            points = frozenset()
        return add_unlinked(walk(tops, deadline_s, points), tops, deadline_s)

    def disk(self, path: str) -> Disk:
        info = os.statvfs(path)
        return Disk(
            total=info.f_blocks * info.f_frsize,
            free=info.f_bavail * info.f_frsize,
            inodes=info.f_files,
            inodes_free=info.f_favail,
            read_only=bool(info.f_flag & os.ST_RDONLY),
        )

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        probe(path, write, deadline_s, self.stuck)

    def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
        if os.geteuid() == 0 and argv:
            began = time.monotonic()
            _look(argv, deadline_s)
            deadline_s = max(0.1, deadline_s - (time.monotonic() - began))
        return run(argv, deadline_s)

    def kernel_log(self) -> list[LogRecord]:
        if self._log is None:
            self._log = kmsg.read()
        return self._log

    def start_nvml(self, deadline_s: float) -> Collector:
        """Start the collector of NVML; the caller polls it until it is done."""
        if self._collector is None:
            self._collector = Collector(deadline_s, self.stuck, self._nvml_needed)
        self._collector.deadline = time.monotonic() + deadline_s
        return self._collector

    def _nvml_needed(self) -> bool:
        """False on a node without GPUs and without NVIDIA's driver; otherwise True."""
        if driver_loaded():
            return True
        from health.nvidia.gpus import wanted

        return wanted(self)

    def take_nvml(self, snapshot: GpuSnapshot) -> None:
        """Set the answer of ``nvml`` from now on."""
        self._snapshot = snapshot

    def nvml(self) -> GpuSnapshot:
        if self._snapshot is None:
            deadline_s = float(self.settings.gate["nvml_deadline"])
            self._snapshot = self.start_nvml(deadline_s).wait()
        return self._snapshot

    def history(self) -> list[Event]:
        from health.history.events import load

        return load(str(self.settings.gate["spool"]))

    def fleet(self) -> Mapping[str, Any]:
        import json

        from health.node import rootfiles

        try:
            fd = rootfiles.open_in(str(self.settings.gate["spool"]), "fleet.json")
        except FileNotFoundError:
            return {}
        with os.fdopen(fd, "rb") as file:
            data = file.read(READ_LIMIT)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise OSError(errno.EBADMSG, "is not a JSON object", "fleet.json")
        return found

    def clock_offset(self) -> float | None:
        """adjtimex(2): what is left to correct, and the error that the daemon estimates."""
        import ctypes
        import struct

        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(512)  # struct timex is 208 bytes; mode 0: only read
        if libc.adjtimex(buffer) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        # modes, offset, freq, maxerror, esterror, status
        _, offset, _, _, estimate_us, status = struct.unpack_from("@illlli", buffer)
        if status & _STA_UNSYNC:
            return None
        left_s = offset / (1e9 if status & _STA_NANO else 1e6)
        return float(abs(left_s) + estimate_us / 1e6)

    def now(self) -> float:
        return self._now

    def uptime(self) -> float:
        return self._uptime

    def boot_id(self) -> str:
        return self._boot_id


def _look(argv: Sequence[str], deadline_s: float) -> None:
    """Look that only root can change what a command runs; in a child, where a script may name what
    lies on a file system that does not answer. Raises OSError."""
    from health.node import executed, trust

    if not executed.names_more(argv):
        trust.command(argv)
        return
    from health.node.silent import call_on

    def hole() -> list[Any]:
        try:
            trust.command(argv)
        except OSError as error:
            return [error.errno, error.strerror, error.filename]
        return []

    found, unseen = call_on(argv[0], hole, deadline_s)
    if unseen:
        text = f"who can change what it runs could not be seen: {unseen}"
        raise TimeoutError(errno.ETIMEDOUT, text, argv[0])
    if found:
        raise OSError(*found)
