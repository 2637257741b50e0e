"""The replay corpus: whole nodes as small patches of a few complete trees, with their verdicts.

``tests/data/replay/bases/*.json`` are complete trees, each in one file; ``cases/*.toml`` hold one
table per case. ``tests/data/replay/README.md`` says how to add either.

    corpus = Corpus()
    corpus.build("xid-79-off-the-bus", directory)   # a tree for `robust-health replay`

``python -m tests.replay_corpus build CASE DIR`` makes the tree of a case, ``… pack DIR`` prints a
recorded tree as a base.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from places import TESTS

from health.node import kmsg
from health.recording import tree

DATA = TESTS / "data" / "replay"
FIELDS = frozenset(
    (
        *("base", "source", "expect", "meta", "nvml", "nvml_remove", "kmsg", "history", "fleet"),
        *("files", "append", "remove", "links", "entries", "disks", "probes", "commands", "fail"),
        "clock_offset",
    )
)
EXPECTED = frozenset(("lead", "reason", "also"))
REMOVED = object()


class Case(NamedTuple):
    """``lead``: "STATUS check device action" of what closes the gate, "open" if nothing does;
    ``also``: "STATUS check device" of every other finding; ``source``: where the fact is from."""

    name: str
    group: str
    base: str
    source: str
    lead: str
    reason: str
    also: tuple[str, ...]
    patch: Mapping[str, Any]

    @property
    def healthy(self) -> bool:
        return self.lead == "open"


class Corpus:
    def __init__(self, data: Path = DATA) -> None:
        self.bases = {path.stem: path for path in sorted((data / "bases").glob("*.json"))}
        self.cases: dict[str, Case] = {}
        for path in sorted((data / "cases").glob("*.toml")):
            for name, patch in tomllib.loads(path.read_text(encoding="utf-8")).items():
                if name in self.cases or name in self.bases:
                    raise ValueError(f"{path.name}: {name} is there twice")
                self.cases[name] = _case(name, path.stem, patch)

    def bundle(self, name: str) -> dict[str, Any]:
        """A base, or a case's base with its patch and those of the cases that it stands on."""
        if name in self.bases:
            return dict(json.loads(self.bases[name].read_text(encoding="utf-8")))
        case = self.cases[name]
        bundle = self.bundle(case.base)
        try:
            _apply(bundle, case.patch)
        except (KeyError, IndexError, TypeError, ValueError) as err:
            raise ValueError(f"{case.group}.toml: {name}: {type(err).__name__}: {err}") from err
        return bundle

    def root(self, name: str) -> str:
        """The base on which a case stands in the end."""
        return name if name in self.bases else self.root(self.cases[name].base)

    def build(self, name: str, directory: Path) -> None:
        """Write the tree of a case or base."""
        write(self.bundle(name), directory)


def _case(name: str, group: str, patch: dict[str, Any]) -> Case:
    expect = patch.get("expect", {})
    unknown = (set(patch) - FIELDS) | (set(expect) - EXPECTED)
    missing = {"base", "source", "expect"} - set(patch)
    if unknown or missing:
        raise ValueError(f"{group}.toml: {name}: unknown {unknown}, missing {missing}")
    also = tuple(expect.get("also", ()))
    lead, reason = expect["lead"], expect.get("reason", "")
    return Case(name, group, patch["base"], patch["source"], lead, reason, also, patch)


def write(
    bundle: Mapping[str, Any], directory: Path, there: Mapping[str, str] | None = None
) -> None:
    """A bundle as a tree on disk (recording/tree.py). ``there``: the files that the last call for
    this directory wrote: only what differs is touched."""
    files, old = bundle.get("files", {}), there or {}
    for path in old.keys() - files.keys():
        _unlink(directory, directory / str(tree.place(path)))
    for path, text in files.items():
        if old.get(path) != text:
            place = directory / str(tree.place(path))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8", newline="")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("meta", "nvml", "calls", "fleet"):
        (directory / f"{name}.json").write_text(json.dumps(bundle.get(name, {})), encoding="utf-8")
    lines = [json.dumps(event) for event in bundle.get("history", [])]
    (directory / tree.HISTORY).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (directory / tree.KMSG).write_text("".join(f"{line}\n" for line in bundle.get("kmsg", [])))


def _unlink(top: Path, place: Path) -> None:
    """A file, and the directories above it that are empty without it."""
    place.unlink()
    for parent in place.parents:
        if parent == top or any(parent.iterdir()):
            return
        parent.rmdir()


# -- patches --------------------------------------------------------------------------------------


def _apply(bundle: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for path, value in patch.get("meta", {}).items():
        _set(bundle.setdefault("meta", {}), path, value)
    for path in patch.get("nvml_remove", ()):
        _set(bundle["nvml"], path, REMOVED)
    for path, value in patch.get("nvml", {}).items():
        _set(bundle["nvml"], path, value)
    bundle.setdefault("fleet", {}).update(patch.get("fleet", {}))
    for path in patch.get("remove", ()):
        _remove(bundle, path)
    for path, text in patch.get("files", {}).items():
        _appear(bundle, path)
        bundle["files"][path] = text
    for path, text in patch.get("append", {}).items():
        bundle["files"][path] += text
    calls = bundle.setdefault("calls", {})
    for path, target in patch.get("links", {}).items():
        _appear(bundle, path)
        calls.setdefault("link", {})[path] = target
    for path, entry in patch.get("entries", {}).items():
        _appear(bundle, path)
        kind, uid, size = entry.get("kind", "file"), entry.get("uid", 0), entry.get("size", 0)
        calls.setdefault("entry", {})[path] = [kind, 0o755, uid, size, 0.0]
    for path, disk in patch.get("disks", {}).items():
        calls.setdefault("disk", {})[path] = disk
    for key, name in patch.get("probes", {}).items():
        calls.setdefault("probe", {})[key] = _failure(name) if name else None
    for key, output in patch.get("commands", {}).items():
        calls.setdefault("command", {})[key.replace(" ", "\n")] = output
    for key, name in patch.get("fail", {}).items():
        kind, _, path = key.partition(" ")
        calls.setdefault(kind, {})[path] = _failure(name)
        bundle["files"].pop(path, None)
    if "clock_offset" in patch:
        calls.setdefault("once", {})["clock_offset"] = patch["clock_offset"] or None  # no daemon
    _log(bundle, patch.get("kmsg", ()))
    _history(bundle, patch.get("history", ()))


def _set(where: Any, path: str, value: Any) -> None:
    """Set "devices/3/ecc/volatile_uncorrected"; "*" is every element of a list, "2,5" these, and
    "12-17" a range; the last one may be new in a table. REMOVED takes it away."""
    key, _, rest = path.partition("/")
    if isinstance(where, list):
        for index in sorted(_indices(key, len(where)), reverse=True):
            if rest:
                _set(where[index], rest, value)
            elif value is REMOVED:
                del where[index]
            else:
                where[index] = value
    elif rest:
        _set(where.setdefault(key, {}), rest, value)
    elif value is REMOVED:
        del where[key]
    else:
        where[key] = value


def _indices(text: str, length: int) -> Iterator[int]:
    if text == "*":
        yield from range(length)
        return
    for part in text.split(","):
        first, _, last = part.partition("-")
        for index in range(int(first), int(last or first) + 1):
            if index >= length:
                raise IndexError(f"{index} of {length}")
            yield index


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _remove(bundle: dict[str, Any], top: str) -> None:
    """Remove the path and everything below it."""
    files, calls = bundle["files"], bundle.get("calls", {})
    gone = [path for path in files if _within(path, top)]
    kept = {kind: [key for key in calls.get(kind, {}) if _within(key, top)] for kind in tree.KINDS}
    parent, _, name = top.rpartition("/")
    listed = calls.get("names", {}).get(parent, [])
    if not gone and not any(kept.values()) and name not in listed:
        raise KeyError(f"there is no {top}")
    for path in gone:
        del files[path]
    for kind, keys in kept.items():
        for key in keys:
            del calls[kind][key]
    if name in listed:
        listed.remove(name)


def _appear(bundle: dict[str, Any], path: str) -> None:
    """Let the path exist: no recorded failure to read or list it, named by its parent."""
    names = bundle.setdefault("calls", {}).setdefault("names", {})
    for kind in ("read", "entry", "link"):
        if tree.is_failure(bundle["calls"].get(kind, {}).get(path)):
            del bundle["calls"][kind][path]
    while path.count("/") > 1:
        path, _, name = path.rpartition("/")
        listed = names.get(path)
        if tree.is_failure(listed):
            del names[path]
        elif listed is not None:
            names[path] = sorted({*listed, name})


def _failure(name: str) -> dict[str, Any]:
    code = getattr(errno, name)
    return {"errno": code, "error": os.strerror(code)}


def _log(bundle: dict[str, Any], added: Iterable[list[Any]]) -> None:
    """[[seconds ago, severity, text]]; two more values: how often, and how many seconds apart."""
    uptime = float(bundle["meta"]["uptime"])
    records = kmsg.parse("\n".join(bundle.get("kmsg", ())))
    records = [record for record in records if record.time <= uptime]
    for ago, level, text, *more in added:
        times, step = more or (1, 0)
        for number in range(times):
            time = uptime - ago + number * step
            if not 0 <= time <= uptime:
                raise ValueError(f"{ago} s ago is not between boot and now: {text}")
            records.append(kmsg.LogRecord(0, time, level, text))
    records.sort(key=lambda record: record.time)
    numbered = (record._replace(seq=number) for number, record in enumerate(records))
    bundle["kmsg"] = [kmsg.format_record(record) for record in numbered]


def _history(bundle: dict[str, Any], added: Iterable[Mapping[str, Any]]) -> None:
    """[{ago = seconds, kind, boot = "", data}]; without a boot it is the running one."""
    now, boot = float(bundle["meta"]["now"]), bundle["meta"]["boot_id"]
    for event in added:
        data = {**event.get("data", {})}
        for key in ("at", "last"):
            data.setdefault(key, float(bundle["meta"]["uptime"]) - event["ago"])
        line = {"time": now - event["ago"], "kind": event["kind"], "boot": event.get("boot", boot)}
        bundle.setdefault("history", []).append({**line, "data": data})


# -- bases ----------------------------------------------------------------------------------------


def pack(directory: Path) -> dict[str, Any]:
    """A recorded tree as a base. What names the site is still in it: read it before you commit."""
    out: dict[str, Any] = {"about": ""}
    for name in ("meta", "nvml", "calls", "fleet"):
        out[name] = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    del out["meta"]["settings"]  # the defaults of the day on which it is replayed
    out["kmsg"] = (directory / tree.KMSG).read_text(encoding="utf-8").splitlines()
    out["history"] = []
    root = directory / tree.FILES
    out["files"] = {
        f"/{path.relative_to(root)}": path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    return out


def text_of(bundle: Mapping[str, Any]) -> str:
    """JSON with one line for each file, device and answer, so that a change is a short diff."""

    def value(found: Any, depth: int) -> str:
        deep = depth >= 3 or not found
        if deep or not isinstance(found, dict | list):
            return json.dumps(found, ensure_ascii=False)
        pad = " " * depth
        if isinstance(found, list):
            inner = [f"{pad} {value(item, depth + 1)}" for item in found]
            return "[\n" + ",\n".join(inner) + f"\n{pad}]"
        inner = [f"{pad} {json.dumps(key)}: {value(v, depth + 1)}" for key, v in found.items()]
        return "{\n" + ",\n".join(inner) + f"\n{pad}}}"

    return value(bundle, 0) + "\n"


def main(words: list[str]) -> int:
    if len(words) == 3 and words[0] == "build":
        Corpus().build(words[1], Path(words[2]))
        return 0
    if len(words) == 2 and words[0] == "pack":
        sys.stdout.write(text_of(pack(Path(words[1]))))
        return 0
    print("usage: python -m tests.replay_corpus build CASE DIR | pack DIR", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
