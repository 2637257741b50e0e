"""The node's own history: its faults, drains, repairs and tests.

Every event is one JSON line in ``<spool>/history.jsonl`` on the node's own disk, and again in
``<state_dir>/nodes/<node>.jsonl``, which all nodes share. Both belong to root. The local file is
written first; lines that the shared one lacks (a dead file system) are copied there later, and
lines that only the shared one has (the node was installed anew) are copied back. A write can never
change a verdict: it happens in a child, with a deadline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from health.children.call import call_in_child
from health.history.order import in_order
from health.node import rootfiles
from health.node.rootfiles import closing
from health.node.silent import call_on
from health.node.system import Event
from robust_slurm.state_dir.plain import ANY_CLOCK, moment

FILE = "history.jsonl"
NODES = "nodes"  # in the state directory; made by the installation, so that a state directory
# that is not mounted is never mistaken for an empty one
SIZE_LIMIT = 4 << 20  # bytes; beyond it the local file is made smaller
READ_LIMIT = 8 << 20
_KEPT_OF_RUNS = 1 << 20  # bytes of other than LASTING lines that stay then
_CHUNK = 1 << 20  # bytes copied to the shared file, or back, at a time
_SHARED = "shared.json"  # up to where both files agree
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
# Events that later decisions about the node depend on; the others are only a record.
LASTING = frozenset(
    {
        "xid", "sxid", "lost", "boot", "reset", "driver", "drain", "undrain", "lifted", "strike",
        "repaired", "burn-in", "withdrawn", "app-xid",
    }
)  # fmt: skip


def line(event: Event) -> bytes:
    """The event as one JSON line; one too long for a record loses its data."""
    fields = event._asdict() | {"data": dict(event.data)}
    raw = rootfiles.line_of(fields)
    if len(raw) <= rootfiles.LINE_LIMIT:
        return raw
    return rootfiles.line_of(fields | {"data": {"cut": len(raw)}})


def parse(raw: bytes) -> list[Event]:
    """The events in these lines, each line once, oldest first; what is no event is left out."""
    lines = dict.fromkeys(raw.split(b"\n"))
    found = (_event(record) for record in rootfiles.records(b"\n".join(lines)))
    return in_order(event for event in found if event)


def _event(record: dict[str, Any]) -> Event | None:
    kind, boot, data = record.get("kind"), record.get("boot"), record.get("data", {})
    if (time := moment(record.get("time"), ANY_CLOCK)) is None:
        return None
    if not isinstance(kind, str) or not isinstance(boot, str) or not isinstance(data, dict):
        return None
    return Event(time, kind, boot, data)


def load(spool: str) -> list[Event]:
    """The local history, oldest first; empty if there is none. Raises OSError."""
    try:
        fd = rootfiles.open_in(spool, FILE)
    except FileNotFoundError:
        return []
    with closing(fd):
        return parse(rootfiles.tail(fd, READ_LIMIT))


def append(spool: str, events: Sequence[Event]) -> None:
    """Write events to the local file. Raises OSError."""
    with closing(_open_spool(spool)) as directory, closing(rootfiles.lock(directory, "lock")):
        _append_locked(directory, FILE, b"".join(line(event) for event in events))


def _open_spool(spool: str) -> int:
    """The node's own directory, made if it is not there."""
    try:
        return rootfiles.open_dir(spool)
    except FileNotFoundError:
        os.makedirs(spool, 0o755, exist_ok=True)  # noqa: PTH103
        return rootfiles.open_dir(spool)


def _append_locked(directory: int, name: str, lines: bytes) -> None:
    with closing(rootfiles.open_file(directory, name, _APPEND)) as fd:
        rootfiles.append(fd, lines)
        if os.fstat(fd).st_size > SIZE_LIMIT:
            _shrink(directory, name, fd)


def _shrink(directory: int, name: str, fd: int) -> None:
    """Rewrite the file with all LASTING events, and the newest of the others."""
    ordinary: list[bytes] = []
    size = 0
    lasting: set[bytes] = set()
    lines = rootfiles.tail(fd, READ_LIMIT).splitlines(keepends=True)
    for raw in reversed(lines):
        if any(b'"kind":"%s"' % kind.encode() in raw for kind in LASTING):
            lasting.add(raw)
        elif size < _KEPT_OF_RUNS:
            ordinary.append(raw)
            size += len(raw)
    kept = lasting.union(ordinary)
    text = b"".join(raw for raw in lines if raw in kept)
    rootfiles.replace(directory, name, text[-SIZE_LIMIT // 2 :] if len(text) > SIZE_LIMIT else text)


class _Position:
    """The position up to which the local and the shared file agree; each is known by its inode."""

    def __init__(self, directory: int) -> None:
        self.local, self.offset, self.shared, self.size = 0, 0, 0, 0
        try:
            fd = rootfiles.open_file(directory, _SHARED, os.O_RDONLY)
        except FileNotFoundError:
            return
        with closing(fd):
            raw = os.read(fd, 4096)
        try:
            numbers = json.loads(raw)
            self.local, self.offset, self.shared, self.size = (int(n) for n in numbers)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return

    def save(self, directory: int) -> None:
        numbers = [self.local, self.offset, self.shared, self.size]
        rootfiles.replace(directory, _SHARED, json.dumps(numbers).encode())


def share(spool: str, state_dir: str, node: str) -> bool:
    """Make the shared file and the local one the same; False: another process is doing it.

    Raises OSError, and blocks while the shared file system does: call it in a child.
    """
    directory = _open_spool(spool)
    nodes = rootfiles.open_dir(f"{state_dir}/{NODES}")
    try:
        only_one = rootfiles.lock(directory, "share.lock", wait=False)
    except BlockingIOError:
        return False
    position = _Position(directory)
    local, inode, end = _unshared(directory, position)
    with closing(rootfiles.lock(nodes, f"{node}.lock")):
        anew = position.shared == 0
        foreign = _merge(nodes, f"{node}.jsonl", local, position, again=inode != position.local)
    position.local, position.offset = inode, end
    _bring_back(directory, foreign, position, first=anew)
    position.save(directory)
    for each in (only_one, nodes, directory):
        os.close(each)
    return True


def tell(state_dir: str, node: str, events: Iterable[Event]) -> None:
    """Write another node's events into its shared file, from which its next sweep fetches them.

    Raises OSError, and blocks while the shared file system does: call it in a child.
    """
    with (
        closing(rootfiles.open_dir(f"{state_dir}/{NODES}")) as nodes,
        closing(rootfiles.lock(nodes, f"{node}.lock")),
    ):
        _append_locked(nodes, f"{node}.jsonl", b"".join(line(event) for event in events))


def _merge(nodes: int, name: str, local: bytes, position: _Position, *, again: bool) -> bytes:
    """Append lines that the shared file lacks; return those that others wrote there since.

    ``again``: the lines may have been shared before (the local file was written anew).
    """
    fd = rootfiles.open_file(nodes, name, _APPEND)
    info = os.fstat(fd)
    known = position.size if info.st_ino == position.shared else 0
    if known > info.st_size:
        known = 0
    most = _CHUNK if known else READ_LIMIT  # all of it for a node that was installed anew
    begin = max(known, info.st_size - most)
    foreign = rootfiles.read_range(fd, begin, most, cut=begin > known)
    recent = set(rootfiles.tail(fd, READ_LIMIT if again else _CHUNK // 4).splitlines())
    new = [raw for raw in local.splitlines() if raw and raw not in recent]
    os.close(fd)
    if new:
        _append_locked(nodes, name, b"\n".join(new) + b"\n")
    info = os.stat(name, dir_fd=nodes, follow_symlinks=False)
    position.shared, position.size = info.st_ino, info.st_size
    return foreign


def _unshared(directory: int, position: _Position) -> tuple[bytes, int, int]:
    """The local lines that were not shared yet, the file's inode, and where they end."""
    with closing(rootfiles.lock(directory, "lock")):
        try:
            fd = rootfiles.open_file(directory, FILE, os.O_RDONLY)
        except FileNotFoundError:
            return b"", 0, 0
    with closing(fd):
        info = os.fstat(fd)
        same = info.st_ino == position.local and position.offset <= info.st_size
        begin = position.offset if same else 0
        lines = rootfiles.read_range(fd, begin, _CHUNK, cut=False)
        return lines, info.st_ino, begin + len(lines)


def _bring_back(directory: int, foreign: bytes, position: _Position, *, first: bool) -> None:
    """Append what only the shared file has to the local one.

    ``first``: put it before what is there, as the node was installed anew: it is older.
    """
    if not foreign:
        return
    with (
        closing(rootfiles.lock(directory, "lock")),
        closing(rootfiles.open_file(directory, FILE, _APPEND)) as fd,
    ):
        own = set(rootfiles.tail(fd, READ_LIMIT).splitlines())
        missing = [raw for raw in foreign.splitlines() if raw and raw not in own]
        info = os.fstat(fd)
        if not missing:
            return
        if first:
            text = b"\n".join(missing) + b"\n" + rootfiles.tail(fd, READ_LIMIT)
            rootfiles.replace(directory, FILE, text)
            if info.st_ino == position.local and info.st_size == position.offset:
                there = os.stat(FILE, dir_fd=directory, follow_symlinks=False)
                position.local, position.offset = there.st_ino, there.st_size
            return
        rootfiles.append(fd, b"\n".join(missing) + b"\n")
        if info.st_ino == position.local and info.st_size == position.offset:
            position.offset = os.fstat(fd).st_size
        elif position.local == 0:
            position.local, position.offset = info.st_ino, os.fstat(fd).st_size


class Unwritten(NamedTuple):
    """The reasons why events were not written down; "": they were."""

    here: str
    shared: str  # what stands here is brought there later

    def __str__(self) -> str:
        return "; ".join(filter(None, self))


def record(
    spool: str, state_dir: str, node: str, events: Iterable[Event], deadline_s: float
) -> Unwritten:
    """Write events down, here and (with a state directory) for all.

    Two children, so that a dead shared file system takes nothing from the local record.
    """
    written = list(events)
    here = shared = ""
    if written:
        here = call_in_child(lambda: append(spool, written), deadline_s / 2)[1]
    if state_dir:
        shared = call_on(state_dir, lambda: share(spool, state_dir, node), deadline_s / 2)[1]
    return Unwritten(here, shared)
