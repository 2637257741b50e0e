"""The fleet's record of strikes, under one lock: it limits the nodes that one job may strike.

The file is ``<state_dir>/nodes/strikes.jsonl`` and belongs to root. Without the limit a user could
give a strike to every node of a large job, whatever was wrong with the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from health.gate.fleet_file import LOOK_BACK, locked
from health.node import rootfiles

NAME = "strikes"


def claim(state_dir: str, job: int, node: str, most: int, now: float) -> bool:
    """Write a strike of this job against this node down, unless it has struck ``most`` others.

    See ``fleet_file.locked`` for what it raises, and blocks for.
    """
    with locked(state_dir, NAME) as fd:
        struck = of_job(rootfiles.records(rootfiles.tail(fd, LOOK_BACK)), job)
        if node in struck:
            return True
        if len(struck) >= most:
            return False
        record = {"time": round(now, 3), "node": node, "job": job}
        rootfiles.append(fd, rootfiles.line_of(record))
        return True


def of_job(records: Iterable[dict[str, Any]], job: int) -> set[str]:
    """The nodes that a job has struck. Pure."""
    return {r["node"] for r in records if r.get("job") == job and isinstance(r.get("node"), str)}
