"""The pool's record, ``<state_dir>/standby/pool.json``: owned by root, written under a lock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from health.children.call import call_in_child
from health.gate.proof import Proof, proof_of
from health.history import events
from health.node import rootfiles
from standby.pool.members import Admission, Wish
from standby.pool.objects import AppliedChanges

VERSION = 1
DIRECTORY = "standby"
FILE = "pool.json"
_LIMIT = 8 << 20  # bytes
_TAIL = 64 << 10  # bytes of a node's history: hours of it
_LONG_TAIL = 4 << 20  # bytes in which a burn-in is looked for: weeks of it
_BURN_IN = b'"kind":"burn-in"'  # as rootfiles.line_of writes it
_READ_S = 20.0


class PoolError(Exception):
    """An error of reading or writing; the text says where, and what to do."""


class PoolRecord(msgspec.Struct, frozen=True):
    """The wish, what was done for it, and the members. Times are wall clock.

    ``short_since``: 0.0 while nothing is missing; ``checked``: when each member last passed a
    check, as of ``applied``.
    """

    wish: Wish
    done: dict[str, AppliedChanges] = {}
    admitted: dict[str, Admission] = {}
    checked: dict[str, float] = {}
    applied: float = 0.0
    short_since: float = 0.0
    v: int = VERSION


def taken(record: PoolRecord) -> tuple[str, ...]:
    """Nodes that left the source and are not in the pool yet."""
    source = record.done.get(record.wish.source)
    return tuple(n for n in (source.removed if source else ()) if n not in record.admitted)


def load(state_dir: str) -> PoolRecord | None:
    """Return the record; None: nothing was applied. Raises PoolError."""
    place = f"{state_dir}/{DIRECTORY}/{FILE}"
    try:
        directory = rootfiles.open_dir(f"{state_dir}/{DIRECTORY}")
        try:
            fd = rootfiles.open_file(directory, FILE, os.O_RDONLY)
        finally:
            os.close(directory)
        with os.fdopen(fd, "rb") as file:
            raw = file.read(_LIMIT)
        found = msgspec.json.decode(raw, type=PoolRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PoolError(f"{place}: {_said(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PoolError(
            f"{place} cannot be read ({error}): repair it; it lists the nodes taken from --from"
        ) from error
    if found.v != VERSION:
        raise PoolError(f"{place} is of version {found.v}: use the release that wrote it")
    return found


def demand(state_dir: str) -> None:
    """Raise PoolError if the state directory is missing: not created, it may just be unmounted."""
    if not state_dir:
        raise PoolError(
            "no state_dir is set: name an absolute path on a shared file system, in robust.toml or "
            "with --state-dir"
        )
    try:
        os.close(rootfiles.open_dir(state_dir))
    except OSError as error:
        raise PoolError(f"{error.filename or state_dir}: {_said(error)}") from error


@contextmanager
def locked(state_dir: str) -> Iterator[int]:
    """Yield the record's directory, created if needed, while its lock is held. Raises PoolError."""
    place = f"{state_dir}/{DIRECTORY}"
    demand(state_dir)
    try:
        os.makedirs(place, 0o755, exist_ok=True)  # noqa: PTH103
        directory = rootfiles.open_dir(place)
    except OSError as error:
        raise PoolError(f"{error.filename or place}: {_said(error)}") from error
    try:
        try:
            held = rootfiles.lock(directory, "lock", wait=False)
        except BlockingIOError:
            raise PoolError(f"{place}/lock: another robust-standby is running; try again") from None
        except OSError as error:
            raise PoolError(f"{place}/lock: {_said(error)}") from error
        try:
            yield directory
        finally:
            os.close(held)
    finally:
        os.close(directory)


def save(directory: int, record: PoolRecord) -> None:
    """Replace the record as a whole. Raises PoolError; then the old one stands."""
    content = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    try:
        rootfiles.replace(directory, FILE, content)
    except OSError as error:
        raise PoolError(f"{DIRECTORY}/{FILE} cannot be written: {_said(error)}") from error


def remove(directory: int) -> None:
    """Remove the record of an apply that changed nothing. Raises PoolError."""
    try:
        os.unlink(FILE, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PoolError(f"{DIRECTORY}/{FILE} cannot be removed: {_said(error)}") from error


def proofs(
    state_dir: str, names: Sequence[str], burn_ins: bool = False
) -> tuple[dict[str, Proof], str]:
    """Return the proofs of the gate's ledger for these nodes; and why it was unreadable, or "".

    ``burn_ins``: also read old burn-ins, not only those of the last hours. A child process with a
    deadline does the reading: the file system may hang.
    """
    if not state_dir:
        return {}, "no state_dir is set"
    rows, error = call_in_child(lambda: _proofs(state_dir, names, burn_ins), _READ_S)
    if error:
        return {}, f"{state_dir}/{events.NODES}: {error}"
    return {name: Proof(*row) for name, row in rows.items()}, ""


def _proofs(state_dir: str, names: Sequence[str], burn_ins: bool) -> dict[str, Proof]:
    found: dict[str, Proof] = {}
    nodes = rootfiles.open_dir(f"{state_dir}/{events.NODES}")
    for name in names:
        try:
            fd = rootfiles.open_file(nodes, f"{name}.jsonl", os.O_RDONLY)
        except OSError:  # no gate there yet, or no file of root's: nothing is proven
            continue
        try:
            lines = rootfiles.tail(fd, _TAIL)
            old = rootfiles.tail(fd, _LONG_TAIL) if burn_ins else b""
            lines += b"".join(x for x in old.splitlines(keepends=True) if _BURN_IN in x)
            found[name] = proof_of(events.parse(lines))
        finally:
            os.close(fd)
    return found


def _said(error: OSError) -> str:
    return error.strerror or str(error)
