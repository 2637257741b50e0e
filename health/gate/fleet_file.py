"""The fleet's files beside the ledger: those that every gate writes to, and the recorded values.

``<state_dir>/nodes/<name>.jsonl`` belongs to root, as all files there, and is written by one gate
at a time: the holder of the lock sees all earlier records. ``fleet.json`` there is copied to the
node's own disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from health.history.events import NODES
from health.node import rootfiles
from health.node.rootfiles import closing

LOOK_BACK = 1 << 20  # bytes: ten thousand records
FLEET = "fleet.json"
_FLEET_LIMIT = 4 << 20  # bytes


@contextmanager
def locked(state_dir: str, name: str) -> Iterator[int]:
    """Open such a file, made when needed, under its lock; it is cut when it has grown long.

    Raises OSError where there is no ledger to trust, and blocks while the file system or another
    gate does: call it in a child.
    """
    file, flags = f"{name}.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT
    with (
        closing(rootfiles.open_dir(f"{state_dir}/{NODES}")) as nodes,
        closing(rootfiles.lock(nodes, f"{name}.lock")),
        closing(rootfiles.open_file(nodes, file, flags)) as fd,
    ):
        yield fd
        if os.fstat(fd).st_size > 2 * LOOK_BACK:
            rootfiles.replace(nodes, file, rootfiles.tail(fd, LOOK_BACK))


def copy_fleet(state_dir: str, spool: str) -> bool:
    """Copy the fleet's recorded values to the spool, if they changed. In a child. OSError."""
    with closing(rootfiles.open_dir(f"{state_dir}/{NODES}")) as nodes:
        try:
            fd = rootfiles.open_file(nodes, FLEET, os.O_RDONLY)
        except FileNotFoundError:
            return False
    with os.fdopen(fd, "rb") as file:
        content = file.read(_FLEET_LIMIT + 1)
    try:
        usable = len(content) <= _FLEET_LIMIT and isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        usable = False
    if not usable:
        raise OSError(0, "is no JSON object of a usable size", FLEET)
    with closing(rootfiles.open_dir(spool)) as directory:
        try:
            old = rootfiles.open_file(directory, FLEET, os.O_RDONLY)
        except FileNotFoundError:
            same = False
        else:
            with os.fdopen(old, "rb") as file:
                same = file.read(_FLEET_LIMIT + 1) == content
        if not same:
            rootfiles.replace(directory, FLEET, content)
        return not same
