"""How many nodes one job may strike: written down for the whole fleet, under one lock.

``<state_dir>/nodes/strikes.jsonl``, root's as all beside it. Else a user could have every node of a
large job carry a strike, whatever was wrong with the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from health import rootfiles
from health.history import NODES

FILE = "strikes.jsonl"
_LOCK = "strikes.lock"
_LOOK_BACK = 1 << 20  # bytes: ten thousand strikes


def claim(state_dir: str, job: int, node: str, most: int, now: float) -> bool:
    """Write a strike of this job against this node down, unless it has struck ``most`` others.

    Raises OSError where there is no ledger to trust, and blocks while the file system or another
    gate does: call it in a child.
    """
    nodes = rootfiles.open_dir(f"{state_dir}/{NODES}")
    held = rootfiles.lock(nodes, _LOCK)
    fd = rootfiles.open_file(nodes, FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        struck = of_job(rootfiles.records(rootfiles.tail(fd, _LOOK_BACK)), job)
        if node not in struck and len(struck) >= most:
            return False
        if node not in struck:
            record = {"time": round(now, 3), "node": node, "job": job}
            rootfiles.append(fd, rootfiles.line_of(record))
        if os.fstat(fd).st_size > 2 * _LOOK_BACK:
            rootfiles.replace(nodes, FILE, rootfiles.tail(fd, _LOOK_BACK))
        return True
    finally:
        for each in (fd, held, nodes):
            os.close(each)


def of_job(records: Iterable[dict[str, Any]], job: int) -> set[str]:
    """The nodes that a job has struck. Pure."""
    return {r["node"] for r in records if r.get("job") == job and isinstance(r.get("node"), str)}
