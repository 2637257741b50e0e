"""An in-memory node for tests of checks: the whole of ``health.node.system.System`` from dicts.

    system = FakeSystem(files={"/proc/loadavg": "0.5 0.4 0.3 1/200 4711\n"}, options={"load": 3})
    assert not processes.CHECK.run(system)

- Directories exist where something lies below them; empty ones are named in ``dirs``.
- An OSError in place of a value is raised: ``files={"/etc/x": PermissionError(13, "denied")}``;
  ``fail`` does so for any path and any question ("/sys/bus/pci": no names, no entry).
- ``options`` are laid over the defaults of the family's ``CHECK.settings``; a key that the family
  has not is a KeyError, so that a test cannot set what nobody reads.
- ``links`` are followed by read, names and disk, as a kernel does; entry and link do not.
- Everything asked is counted in ``asked`` ("nvml", "kernel_log", "command /usr/bin/x", "read /p").
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from health import checks
from health.node.gpu_snapshot import GpuSnapshot
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

GIB = 1 << 30
NOW = 1_700_000_000.0
UPTIME = 86_400.0
BOOT = "11111111-2222-4333-8444-555555555555"


def context(
    where: str = "prolog", node: str = "n1", job: int = 7, uid: int = 1000, **env: str
) -> Context:
    """A context; ``env`` is laid over the few variables Slurm always sets."""
    base = {"SLURMD_NODENAME": node}
    if job:
        base |= {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(uid)}
    return Context(where, node, job, uid if job else -1, base | env)


def log(*texts: str, level: int = 3, time: float = 100.0) -> list[LogRecord]:
    """Kernel messages one second apart."""
    return [LogRecord(i, time + i, level, text) for i, text in enumerate(texts)]


class FakeSystem:
    def __init__(
        self,
        files: Mapping[str, str | OSError] | None = None,
        *,
        links: Mapping[str, str] | None = None,
        dirs: Sequence[str] = (),
        entries: Mapping[str, PathEntry] | None = None,
        fail: Mapping[str, OSError] | None = None,
        disks: Mapping[str, Disk | OSError] | None = None,
        probes: Mapping[str, OSError | None] | None = None,
        commands: Mapping[tuple[str, ...], CommandOutput | OSError] | None = None,
        kmsg: Sequence[LogRecord] | OSError = (),
        snapshot: GpuSnapshot | None = None,
        history: Sequence[Event] = (),
        fleet: Mapping[str, Any] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        context: Context = context(),  # noqa: B008 (immutable)
        now: float = NOW,
        uptime: float = UPTIME,
        boot: str = BOOT,
        clock_offset: float | None = 0.0,
    ) -> None:
        self.files: dict[str, str | OSError] = dict(files or {})
        self.links = dict(links or {})
        self.dirs = set(dirs)
        self.entries = dict(entries or {})
        self.fail = dict(fail or {})
        self.disks = dict(disks or {})
        self.probes = dict(probes or {})
        self.commands = dict(commands or {})
        self.kmsg = kmsg
        self.snapshot: GpuSnapshot = (
            snapshot if snapshot is not None else {"stage": "done", "count": 0, "devices": []}
        )
        self.events = list(history)
        self.fleet_values = dict(fleet or {})
        self.overrides = {family: dict(table) for family, table in (options or {}).items()}
        self.context = context
        self._now, self._uptime, self._boot = now, uptime, boot
        self._clock_offset = clock_offset
        self.asked: Counter[str] = Counter()
        self.whole = True  # ``usage`` sees everything

    def options(self, family: str) -> Mapping[str, Any]:
        over = self.overrides.get(family, {})
        if family not in checks.FAMILIES:
            return over
        settings = checks.load(family).settings
        unknown = set(over) - set(settings)
        if unknown:
            raise KeyError(f"[health.{family}] has no {sorted(unknown)}")
        return {key: setting.default for key, setting in settings.items()} | over

    def read(self, path: str) -> str:
        self._ask("read", path)
        real = self._follow(path)
        if real in self.files:
            value = self.files[real]
            if isinstance(value, OSError):
                raise value
            return value[:READ_LIMIT]
        if self._is_dir(real):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise _absent(path)

    def names(self, path: str) -> list[str]:
        self._ask("names", path)
        real = self._follow(path)
        if not self._is_dir(real):
            if real in self.files or real in self.entries:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            raise _absent(path)
        below = real.rstrip("/") + "/"
        return sorted({p[len(below) :].split("/")[0] for p in self._paths() if p.startswith(below)})

    def link(self, path: str) -> str:
        self._ask("link", path)
        place = self._place(path)
        if place in self.links:
            return self.links[place]
        if place in self.files or place in self.entries or self._is_dir(place):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        raise _absent(path)

    def entry(self, path: str) -> PathEntry:
        self._ask("entry", path)
        place = self._place(path)
        if place in self.entries:
            return self.entries[place]
        if place in self.links:
            return PathEntry("link", 0o777, 0, len(self.links[place]), self._now)
        value = self.files.get(place)
        if isinstance(value, OSError):
            raise value
        if value is not None:
            return PathEntry("file", 0o644, 0, len(value), self._now)
        if self._is_dir(place):
            return PathEntry("dir", 0o755, 0, 4096, self._now)
        raise _absent(path)

    def usage(self, tops: Sequence[str], deadline_s: float) -> Usage:
        for top in tops:
            self._ask("usage", top)
        found: dict[int, list[int]] = {}
        for path, entry in self.entries.items():
            if any(path.startswith(f"{top}/") for top in tops):
                row = found.setdefault(entry.uid, [entry.uid, 0, 0])
                row[1], row[2] = row[1] + entry.size, row[2] + 1
        return Usage(list(found.values()), len(self.entries), self.whole)

    def disk(self, path: str) -> Disk:
        self._ask("disk", path)
        value = self.disks.get(path, self.disks.get(self._follow(path)))
        if value is None:
            raise _absent(path)
        if isinstance(value, OSError):
            raise value
        return value

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        self._ask("probe", path)
        if path not in self.probes:
            raise _absent(path)
        error = self.probes[path]
        if error is not None:
            raise error

    def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
        self._ask("command", argv[0])
        value = self.commands.get(tuple(argv))
        if value is None:
            raise _absent(argv[0])
        if isinstance(value, OSError):
            raise value
        return value

    def kernel_log(self) -> list[LogRecord]:
        self.asked["kernel_log"] += 1
        if isinstance(self.kmsg, OSError):
            raise self.kmsg
        return list(self.kmsg)

    def nvml(self) -> GpuSnapshot:
        self.asked["nvml"] += 1
        return self.snapshot

    def history(self) -> list[Event]:
        self.asked["history"] += 1
        return list(self.events)

    def fleet(self) -> Mapping[str, Any]:
        self.asked["fleet"] += 1
        return self.fleet_values

    def clock_offset(self) -> float | None:
        return self._clock_offset

    def now(self) -> float:
        return self._now

    def uptime(self) -> float:
        return self._uptime

    def boot_id(self) -> str:
        return self._boot

    def _ask(self, question: str, path: str) -> None:
        self.asked[f"{question} {path}"] += 1
        if path in self.fail:
            raise self.fail[path]

    def _paths(self) -> list[str]:
        return [*self.files, *self.links, *self.entries, *self.dirs]

    def _is_dir(self, path: str) -> bool:
        below = path.rstrip("/") + "/"
        entry = self.entries.get(path)
        return (
            path in self.dirs
            or (entry is not None and entry.kind == "dir")
            or any(p.startswith(below) for p in self._paths())
        )

    def _place(self, path: str) -> str:
        """The path with the links of its directory followed, but not the last component."""
        head, tail = posixpath.split(posixpath.normpath(path))
        return posixpath.join(self._follow(head), tail) if head != path else path

    def _follow(self, path: str, depth: int = 0) -> str:
        if depth > 16:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        parts = posixpath.normpath(path).strip("/").split("/")
        for n in range(1, len(parts) + 1):
            here = "/" + "/".join(parts[:n])
            if here in self.links:
                target = posixpath.join(posixpath.dirname(here), self.links[here], *parts[n:])
                return self._follow(target, depth + 1)
        return posixpath.normpath(path)


def _absent(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
