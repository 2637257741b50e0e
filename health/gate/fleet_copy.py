"""The fleet's recorded values, brought from the shared file system to the node's own disk."""

from __future__ import annotations

import json
import os

from health.history import events
from health.node import rootfiles

FLEET = "fleet.json"
_FLEET_LIMIT = 4 << 20  # bytes


def copy_fleet(state_dir: str, spool: str) -> bool:
    """Copy the fleet's recorded values to the spool, if they changed. In a child. OSError."""
    nodes = rootfiles.open_dir(f"{state_dir}/{events.NODES}")
    try:
        fd = rootfiles.open_file(nodes, FLEET, os.O_RDONLY)
    except FileNotFoundError:
        return False
    finally:
        os.close(nodes)
    with os.fdopen(fd, "rb") as file:
        content = file.read(_FLEET_LIMIT + 1)
    try:
        usable = len(content) <= _FLEET_LIMIT and isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        usable = False
    if not usable:
        raise OSError(0, "is no JSON object of a usable size", FLEET)
    directory = rootfiles.open_dir(spool)
    try:
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
    finally:
        os.close(directory)
