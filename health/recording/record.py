"""A live system that records every answer in a directory tree, which replays to the same verdict.

Checks run in several processes and may be killed at any point: each answer is on disk before the
check gets it. The tree contains serial numbers and names of processes, so only root can read it; of
the environment it has only Slurm's own variables.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from health.node import kmsg, rootfiles
from health.node.gpu_snapshot import GpuSnapshot
from health.node.system import CommandOutput, Disk, Event, LogRecord, PathEntry, Usage
from health.nvidia.nvml import Collector
from health.recording import tree
from health.run.lane import FamilyResult
from health.run.live import LiveSystem

T = TypeVar("T")

_JOURNAL = "calls.jsonl"  # what becomes calls.json at the end
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Looked at again and again until they change: replay gives the last answer.
_CHANGING = re.compile(r"/proc/\d+/")


class RecordingSystem:
    """``system``, recorded in ``directory``, which must not exist, or be empty and our own.

    If an answer cannot be kept (a full disk), the check still gets it, and ``finish`` raises.
    """

    def __init__(self, system: LiveSystem, directory: str):
        _take(directory)
        self.context = system.context
        self.settings = system.settings
        self.stuck = system.stuck
        self._system = system
        self._directory = directory
        self._outcomes: dict[str, Any] = {}

    # The parts that the runner drives.

    def start_nvml(self, deadline_s: float) -> Collector:
        return self._system.start_nvml(deadline_s)

    def take_nvml(self, snapshot: GpuSnapshot) -> None:
        self._write(tree.NVML, json.dumps(snapshot, indent=1) + "\n")
        self._system.take_nvml(snapshot)

    def saw(self, outcome: FamilyResult) -> None:
        """Keep the runner's outcome of a check that hung or died, which a replay cannot repeat."""
        if outcome.by_runner:
            findings = [finding.as_dict() for finding in outcome.findings]
            self._outcomes[outcome.check.name] = {"status": outcome.status, "findings": findings}

    def finish(self) -> None:
        """Write the final files, without which the tree is no recording.

        Raises OSError if an answer could not be kept: the tree is incomplete then.
        """
        self._raise_what_failed()
        calls: dict[str, dict[str, Any]] = {kind: {} for kind in tree.KINDS}
        for line in self._journal():
            kind, key, answer = json.loads(line)
            calls[kind].setdefault(key, answer)
        self._write(tree.CALLS, json.dumps(calls, indent=1) + "\n")
        meta = {
            "format": tree.FORMAT,
            "context": {**self.context._asdict(), "env": dict(self.context.env)},
            "now": self.now(),
            "uptime": self.uptime(),
            "boot_id": self.boot_id(),
            "settings": self.settings._asdict(),
            "outcomes": self._outcomes,
        }
        self._write(tree.META, json.dumps(meta, indent=1) + "\n")
        self._raise_what_failed()
        for name in (_JOURNAL, tree.UNFINISHED):
            try:
                os.unlink(f"{self._directory}/{name}")  # noqa: PTH108
            except FileNotFoundError:
                pass

    def _failed(self, error: OSError) -> None:
        """Remember, in a way that needs no room and that every process sees."""
        mark = f"{self._directory}/{tree.UNFINISHED}"
        try:
            os.rename(mark, f"{mark}-{error.errno or errno.EIO}")  # noqa: PTH104
        except FileNotFoundError:
            pass  # another one did

    def _raise_what_failed(self) -> None:
        for name in os.listdir(self._directory):  # noqa: PTH208
            code = name.removeprefix(f"{tree.UNFINISHED}-")
            if code != name:
                raise OSError(int(code), os.strerror(int(code)), self._directory)

    # The questions of a check.

    def options(self, family: str) -> Mapping[str, Any]:
        return self._system.options(family)

    def read(self, path: str) -> str:
        place = tree.place(path)
        changing = place is not None and _CHANGING.match(path) is not None
        kept = self._kept(place) if place and not changing else None
        if kept is not None:
            return kept  # the first answer is the one that replay will give
        try:
            text = self._system.read(path)
        except OSError as err:
            if changing:
                self._forget(place)
            self._note("read", path, tree.failure(err))
            raise
        if changing:
            self._forget(place)
        if place is None or not self._write(place, text):
            self._note("read", path, text)
        return text

    def names(self, path: str) -> list[str]:
        return self._ask("names", path, lambda: self._system.names(path))

    def link(self, path: str) -> str:
        return self._ask("link", path, lambda: self._system.link(path))

    def entry(self, path: str) -> PathEntry:
        return self._ask("entry", path, lambda: self._system.entry(path))

    def usage(self, tops: Sequence[str], deadline_s: float) -> Usage:
        key = tree.words_key(tops)
        return self._ask("usage", key, lambda: self._system.usage(tops, deadline_s))

    def disk(self, path: str) -> Disk:
        return self._ask("disk", path, lambda: self._system.disk(path))

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        key = tree.probe_key(path, write)
        self._ask("probe", key, lambda: self._system.probe(path, write, deadline_s))

    def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
        key = tree.words_key(argv)
        return self._ask("command", key, lambda: self._system.command(argv, deadline_s))

    def kernel_log(self) -> list[LogRecord]:
        records = self._once("kernel_log", self._system.kernel_log)
        text = "".join(kmsg.format_record(record) + "\n" for record in records)
        self._write(tree.KMSG, text)
        return records

    def nvml(self) -> GpuSnapshot:
        return self._system.nvml()

    def history(self) -> list[Event]:
        events = self._once("history", self._system.history)
        lines = [json.dumps({**e._asdict(), "data": dict(e.data)}) + "\n" for e in events]
        self._write(tree.HISTORY, "".join(lines))
        return events

    def fleet(self) -> Mapping[str, Any]:
        values = self._once("fleet", self._system.fleet)
        self._write(tree.FLEET, json.dumps(values, indent=1) + "\n")
        return values

    def clock_offset(self) -> float | None:
        return self._ask("once", "clock_offset", self._system.clock_offset)

    def now(self) -> float:
        return self._system.now()

    def uptime(self) -> float:
        return self._system.uptime()

    def boot_id(self) -> str:
        return self._system.boot_id()

    # -- keeping an answer

    def _ask(self, kind: str, key: str, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except OSError as err:
            self._note(kind, key, tree.failure(err))
            raise
        self._note(kind, key, answer)
        return answer

    def _note(self, kind: str, key: str, answer: Any) -> None:
        """One line in one write: workers append at the same time."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        line = json.dumps([kind, key, answer]).encode() + b"\n"
        try:
            journal = os.open(f"{self._directory}/{_JOURNAL}", flags, 0o600)
            with rootfiles.closing(journal) as fd:
                if os.write(fd, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as err:
            self._failed(err)

    def _once(self, name: str, call: Callable[[], T]) -> T:
        """An answer that has a file of its own: only its failure is noted."""
        try:
            return call()
        except OSError as err:
            self._note("once", name, tree.failure(err))
            raise

    def _journal(self) -> list[str]:
        try:
            with open(f"{self._directory}/{_JOURNAL}", encoding="utf-8") as file:
                return [line for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def _kept(self, place: str) -> str | None:
        try:
            with open(f"{self._directory}/{place}", encoding="utf-8", newline="") as file:
                return file.read()
        except OSError:
            return None

    def _forget(self, place: str | None) -> None:
        try:
            os.unlink(f"{self._directory}/{place}")  # noqa: PTH108
        except OSError:
            pass  # it was not kept yet

    def _write(self, place: str, text: str) -> bool:
        """Put a file into the tree; False if it is there or has no place there."""
        path = f"{self._directory}/{place}"
        try:
            os.makedirs(path.rpartition("/")[0], mode=0o700, exist_ok=True)  # noqa: PTH103
            fd = os.open(path, _NEW, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        except (FileExistsError, NotADirectoryError):
            return False
        except OSError as err:
            self._failed(err)
        return True


def _take(directory: str) -> None:
    """Make the directory, or accept an empty one of ours. ValueError says why not."""
    try:
        os.mkdir(directory, 0o700)  # noqa: PTH102
    except FileExistsError:
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise ValueError(f"{directory} is not a directory of ours") from None
        if os.listdir(directory):  # noqa: PTH208
            raise ValueError(f"{directory} is not empty") from None
        os.chmod(directory, 0o700)  # noqa: PTH101
    fd = os.open(f"{directory}/{tree.UNFINISHED}", _NEW, 0o600)
    os.close(fd)
