"""The collector: a process of its own asks NVML everything, so that a hang stops only that process.

It streams its results as JSON lines, with its current stage. Past the deadline it is killed, or
left behind if the driver holds it; the snapshot then has ``hung``, the stage, and ``killed``.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import select
import time
from collections.abc import Callable
from typing import Any, cast

from health.children.child import Child, fork, where_it_hangs, write_all
from health.node.gpu_snapshot import GpuSnapshot
from health.node.stuck import Stuck

_LIMIT = 8 << 20  # bytes of all answers together
_STUCK = "nvml"
# A killed process ends only when its call into the driver returns: starting a GPU takes seconds.
_DIES_S = 10.0


def _collect(fd: int, needed: Callable[[], bool] | None) -> None:
    """Ask NVML, in the child, and write each result as a line."""

    def say(kind: str, value: Any) -> None:
        write_all(fd, json.dumps([kind, value]).encode() + b"\n")

    if needed is not None:
        say("stage", "slurm.conf")  # it may lie on a file system that does not answer
        if not needed():
            say("stage", "done")
            return
    say("stage", "import")
    try:
        nv = importlib.import_module("pynvml")
    except ImportError:
        say("error", "no-pynvml")
        return
    from health.nvidia.nvml_query import ask

    ask(nv, say)


class Collector:
    """One collection under way. Poll ``fd``, ``feed`` when readable, ``expire`` at ``deadline``.

    ``needed`` is asked first, in the collector's process: False leaves NVML alone.
    ``deadline`` moves on once, when the process is killed and does not end at once: to
    ``dies_s`` later, but never past ``limit``. Then it is left behind.
    """

    def __init__(
        self,
        deadline_s: float,
        stuck: Stuck | None = None,
        needed: Callable[[], bool] | None = None,
    ) -> None:
        self.snapshot = empty("fork")
        self.done = False
        self.limit = float("inf")
        self.dies_s = _DIES_S
        self._began = time.monotonic()
        self._stuck = stuck
        self._rest = b""
        self._size = 0
        self._child: Child | None = None
        self.deadline = self._began + deadline_s
        still = stuck.still(_STUCK) if stuck else ""
        if still:  # another one would only hang as well
            self.snapshot["stage"] = still
            self.snapshot["hung"] = True
            self.done = True
            return
        try:
            self._child = fork(lambda fd: _collect(fd, needed), deadline_s)
        except OSError as err:  # no memory, too many processes
            self.snapshot["error"] = (
                f"died-no-process-{errno.errorcode.get(err.errno or 0, 'error')}"
            )
            self.done = True

    @property
    def fd(self) -> int:
        return self._child.fd if self._child else -1

    def feed(self) -> None:
        """Take what has come; sets ``done`` at the end."""
        child = self._child
        while child and not self.done:
            try:
                data = child.read()
            except BlockingIOError:
                return
            if self.snapshot["hung"]:  # killed: only its end counts
                if not data:
                    self._give_up()
                    return
                continue
            self._size += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            if self.snapshot["stage"] == "done" or self.snapshot["error"]:
                self._finish()
            elif not data or self._size > _LIMIT:
                self._died("too many answers" if data else "")

    def expire(self) -> None:
        """Kill the process, as the deadline is over; ``done`` once it ended or is left behind."""
        child = self._child
        if child is None or self.done:
            return
        if not self.snapshot["hung"]:
            now = time.monotonic()
            where = where_it_hangs(child.pid)
            self.snapshot["hung"] = True
            self.snapshot["waited"] = round(now - self._began, 3)
            if where:
                self.snapshot["stage"] += f" ({where})"
            child.stop(0.0)
            self.deadline = min(now + self.dies_s, self.limit)
        self._give_up()

    def wait(self) -> GpuSnapshot:
        """The snapshot, at the deadline at the latest, or ``dies_s`` later if it hangs."""
        poll = select.poll()
        if not self.done:
            poll.register(self.fd, select.POLLIN)
        while not self.done:
            left = self.deadline - time.monotonic()
            if left <= 0:
                self.expire()
            elif poll.poll(left * 1000):
                self.feed()
        return self.snapshot

    def close(self) -> None:
        if self._child:
            self.limit = 0.0
            self.expire()
            self._child.close()
            self._child = None

    def _give_up(self) -> None:
        """Set ``done`` if the killed process has ended, or the time for that is over."""
        child = self._child
        if child is None:
            return
        self.snapshot["killed"] = child.ended(0.05) is not None
        self.done = self.snapshot["killed"] or time.monotonic() >= min(self.deadline, self.limit)
        if self.done and not self.snapshot["killed"] and self._stuck:
            self._stuck.remember(_STUCK, child.pid, self.snapshot["stage"])

    def _take(self, line: bytes) -> None:
        snapshot = cast("dict[str, Any]", self.snapshot)
        try:
            kind, value = json.loads(line)
        except ValueError:
            return
        if kind in ("stage", "error") and isinstance(value, str):
            snapshot[kind] = value
        elif kind == "top" and isinstance(value, dict):
            snapshot.update(value)
        elif kind in ("device", "lost"):
            snapshot["devices" if kind == "device" else "lost"].append(value)

    def _finish(self) -> None:
        self.done = True
        if self._child:
            self._child.stop(0.0)  # all results are here; closing the driver may take it a while

    def _died(self, why: str) -> None:
        """The pipe ended before the answers did."""
        code = self._child.ended(0.2) if self._child else 0
        signal = f"died-signal-{-code}" if code is not None and code < 0 else f"died-exit-{code}"
        self.snapshot["error"] = why.replace(" ", "-") or signal
        self._finish()


def driver_loaded() -> bool:
    """True if NVIDIA's kernel module is loaded; nothing is asked of it."""
    return os.path.exists("/proc/driver/nvidia/version")  # noqa: PTH110


def empty(stage: str, error: str = "") -> GpuSnapshot:
    """A snapshot in which nothing was learnt yet."""
    return {
        "stage": stage,
        "hung": False,
        "killed": False,
        "waited": 0.0,
        "error": error,
        "driver": "",
        "nvml": "",
        "cuda": "",
        "count": 0,
        "devices": [],
        "lost": [],
    }
