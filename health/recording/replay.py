"""A node read from a recorded tree, or from one built by hand: it answers as the live node did.

A path that is not in the tree gives ENOENT. A tree built by hand may leave out nearly everything:
names and kinds then come from ``files/``, the log is empty, and NVML has no library.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from health.check import EVERYWHERE, Check, Where
from health.node import kmsg
from health.node.gpu_snapshot import GpuSnapshot
from health.node.system import CommandOutput, Context, Disk, Event, LogRecord, PathEntry, Usage
from health.nvidia.nvml import empty
from health.recording import replay_meta, tree
from health.run.lane import FamilyResult
from health.run.report import GateReport
from health.run.runner import run_inline

_NOW = 1_700_000_000.0  # for trees that do not say
_UPTIME = 86_400.0
# Errors of a path that is not in the tree, or is of another kind there.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class BadTree(ValueError):
    """The directory is no tree that can be replayed; the text says which file and why."""


class ReplaySystem:
    """``directory`` as health/recording/tree.py describes it; raises BadTree."""

    def __init__(self, directory: str, checks: Iterable[Check]):
        self._root = os.path.realpath(directory)
        if not os.path.isdir(self._root):  # noqa: PTH112
            raise BadTree(f"{directory} is not a directory")
        self._bad = ""
        self._unfinished()
        meta = self._json(tree.META)
        if not meta and not os.path.isdir(f"{self._root}/{tree.FILES}"):  # noqa: PTH112
            raise BadTree(
                f"{directory} has neither {tree.META} nor {tree.FILES}/: not a recording; "
                "`robust-health record DIR` makes one"
            )
        if meta.get("format", tree.FORMAT) != tree.FORMAT:
            raise BadTree(
                f"{directory}/{tree.META}: format {meta['format']!r}, this robust-health reads "
                f"{tree.FORMAT}; replay it with the version that recorded it"
            )
        self._calls = self._answers()
        self._nvml = self._snapshot()
        self._fleet = self._json(tree.FLEET)
        self._checks = tuple(checks)
        try:
            self._read_meta(meta)
        except (TypeError, ValueError, KeyError, AttributeError) as err:
            raise BadTree(f"{directory}/{tree.META}: {type(err).__name__}: {err}") from None

    def _read_meta(self, meta: Mapping[str, Any]) -> None:
        self.settings = replay_meta.settings(meta.get("settings", {}), self._checks)
        given = meta.get("context", {})
        where = str(given.get("where", "prolog"))
        if where not in EVERYWHERE:  # no check would run, and the gate be open
            raise ValueError(f"where is {where!r}, want one of {', '.join(sorted(EVERYWHERE))}")
        self.context = Context(
            where=where,
            node=str(given.get("node", "n1")),
            job=int(given.get("job", 0)),
            uid=int(given.get("uid", -1)),
            env={str(key): str(value) for key, value in given.get("env", {}).items()},
        )
        self._now = float(meta.get("now", _NOW))
        self._uptime = float(meta.get("uptime", _UPTIME))
        self._boot_id = str(meta.get("boot_id", "00000000-0000-0000-0000-000000000000"))
        self._outcomes = [
            FamilyResult(
                check, 0.0, replay_meta.findings(kept["findings"]), str(kept["status"]), True
            )
            for check in self._checks
            if (kept := meta.get("outcomes", {}).get(check.name)) is not None
        ]

    def report(self, only: Sequence[str] = ()) -> GateReport:
        """Run the checks of the place for which the tree was recorded. Raises BadTree."""
        where = cast(Where, self.context.where)
        report = run_inline(self, self._checks, where, self.settings, only, self._outcomes)
        if self._bad:  # a check has reported an error of the tree as one of the node
            raise BadTree(self._bad)
        return report

    def pause(self, seconds: float) -> None:
        """Return at once, as nothing changes: a check that wants to look again need not wait."""

    def options(self, family: str) -> Mapping[str, Any]:
        return self.settings.options(family)

    def read(self, path: str) -> str:
        try:
            with open(self._place(path), encoding="utf-8", errors="replace", newline="") as file:
                return file.read()
        except OSError as err:
            code = err.errno
        kept = self._call("read", path)
        if kept is None:
            self._own_trouble(code, path)
            raise OSError(code, os.strerror(code or errno.ENOENT), path)
        return str(kept)

    def names(self, path: str) -> list[str]:
        kept = self._call("names", path)
        if kept is not None:
            if not isinstance(kept, list):
                self._bad = f"{self._root}/{tree.CALLS}: names of {path}: {kept!r} is no list"
                raise BadTree(self._bad)
            return [str(name) for name in kept]
        try:
            return sorted(os.listdir(self._place(path)))  # noqa: PTH208
        except OSError as err:
            self._own_trouble(err.errno, path)
            raise

    def link(self, path: str) -> str:
        return str(self._known("link", path))

    def entry(self, path: str) -> PathEntry:
        kept = self._call("entry", path)
        if kept is not None:
            return cast(PathEntry, self._made(PathEntry, kept, path))
        info = os.stat(self._place(path))  # noqa: PTH116
        directory = os.path.isdir(self._place(path))  # noqa: PTH112
        kind, mode = ("dir", 0o755) if directory else ("file", 0o644)
        return PathEntry(kind, mode, 0, info.st_size, self._now - self._uptime)

    def usage(self, tops: Sequence[str], deadline_s: float) -> Usage:
        kept = self._call("usage", tree.words_key(tops))
        if kept is not None:
            return cast(Usage, self._made(Usage, kept, tree.words_key(tops)))
        owners: dict[int, list[int]] = {}
        waiting, seen = list(tops), 0
        while waiting:  # a tree from before there was this question, or built by hand
            here = waiting.pop()
            try:
                found = {path: self.entry(path) for path in self._below(here)}
            except OSError:
                continue
            for path, entry in found.items():
                row = owners.setdefault(entry.uid, [entry.uid, 0, 0])
                row[1], row[2], seen = row[1] + entry.size, row[2] + 1, seen + 1
                waiting += [path] if entry.kind == "dir" else []
        return Usage(list(owners.values()), seen, whole=True)

    def _below(self, directory: str) -> list[str]:
        return [f"{directory}/{name}" for name in self.names(directory)]

    def disk(self, path: str) -> Disk:
        return cast(Disk, self._made(Disk, self._known("disk", path), path))

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        key = tree.probe_key(path, write)
        if key not in self._calls.get("probe", {}):
            os.stat(self._place(path))  # noqa: PTH116
        self._call("probe", key)

    def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
        key = tree.words_key(argv)
        return cast(CommandOutput, self._made(CommandOutput, self._known("command", key), key))

    def kernel_log(self) -> list[LogRecord]:
        self._call("once", "kernel_log")
        return kmsg.parse(self._text(tree.KMSG))

    def nvml(self) -> GpuSnapshot:
        return self._nvml

    def history(self) -> list[Event]:
        self._call("once", "history")
        from health.history.events import parse

        return parse(self._text(tree.HISTORY).encode())

    def fleet(self) -> Mapping[str, Any]:
        self._call("once", "fleet")
        return self._fleet

    def clock_offset(self) -> float | None:
        if "clock_offset" not in self._calls.get("once", {}):
            return 0.0
        kept = self._call("once", "clock_offset")
        return None if kept is None else float(kept)

    def now(self) -> float:
        return self._now

    def uptime(self) -> float:
        return self._uptime

    def boot_id(self) -> str:
        return self._boot_id

    def _unfinished(self) -> None:
        for name in sorted(os.listdir(self._root)):  # noqa: PTH208
            if name.startswith(tree.UNFINISHED):
                code = name.removeprefix(f"{tree.UNFINISHED}-")
                why = f" ({os.strerror(int(code))})" if code.isdigit() else ""
                raise BadTree(
                    f"{self._root}: the recording was not finished{why}; record the node again"
                )

    def _answers(self) -> dict[str, dict[str, Any]]:
        found = self._json(tree.CALLS)
        for kind, answers in found.items():
            if not isinstance(answers, dict):
                raise BadTree(f"{self._root}/{tree.CALLS}: {kind} is not a JSON object")
        return found

    def _snapshot(self) -> GpuSnapshot:
        found = self._json(tree.NVML)
        for key in ("devices", "lost"):
            gpus = found.get(key, [])
            if not isinstance(gpus, list) or not all(isinstance(gpu, dict) for gpu in gpus):
                raise BadTree(f"{self._root}/{tree.NVML}: {key} is not a list of JSON objects")
        return cast(GpuSnapshot, found) if found else empty("init", "no-library")

    def _made(self, kind: Any, kept: Any, key: str) -> Any:
        """An answer of several fields."""
        if not isinstance(kept, list) or len(kept) != len(kind._fields):
            self._bad = f"{self._root}/{tree.CALLS}: {key}: {kept!r} is no {kind.__name__.lower()}"
            raise BadTree(self._bad)
        return kind(*kept)

    def _own_trouble(self, code: int | None, path: str) -> None:
        """Raise BadTree unless an error of the tree's own file says what the node would."""
        if code not in _ABSENT:
            below = tree.place(path) or tree.FILES
            self._bad = f"{self._root}/{below}: {os.strerror(code or errno.EIO)}"
            raise BadTree(self._bad)

    def _call(self, kind: str, key: str) -> Any:
        """The answer that was kept, None if there is none; a kept failure is raised."""
        answer: Any = self._calls.get(kind, {}).get(key)
        if tree.is_failure(answer):
            raise tree.raised(answer, key)
        return answer

    def _known(self, kind: str, key: str) -> Any:
        answer = self._call(kind, key)
        if answer is None:
            raise OSError(errno.ENOENT, "not in the recorded tree", key)
        return answer

    def _place(self, path: str) -> str:
        """The place of a path's text; a link out of the tree is not followed."""
        below = tree.place(path) or tree.FILES
        real = os.path.realpath(f"{self._root}/{below}")
        if path != "/" and (below == tree.FILES or not real.startswith(f"{self._root}/")):
            raise OSError(errno.ENOENT, "not in the recorded tree", path)
        return real

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._root}/{name}", encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
        except OSError as err:
            self._bad = f"{self._root}/{name}: {err.strerror}"
            raise BadTree(self._bad) from None

    def _json(self, name: str) -> dict[str, Any]:
        text = self._text(name)
        if not text:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise BadTree(f"{self._root}/{name}: {err}") from None
        if not isinstance(found, dict):
            raise BadTree(f"{self._root}/{name}: not a JSON object")
        return found
