"""The plan of a requeue, ``requeue.json`` among the job's records: how the job is to start again.

robust-srun writes it before it requeues its job. The controller hooks start the job at once only
when Slurm has taken over what the plan says. The file belongs to the job's user: all that it can do
is to keep the hooks from acting on that user's own job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

NAME = "requeue.json"
LIMIT = 256 << 10  # bytes of the file
_MOST_NODES = 20_000
_LONGEST_NAME = 64


class RequeuePlan(NamedTuple):
    """``restarts``: of the run that ends. ``exclude``: nodes that the job must not start on.

    ``nodes``: as many as it needs, which a job that was shrunk does not ask for by itself.
    ``not_before``: seconds since 1970; 0.0: as soon as it can.
    """

    restarts: int
    exclude: tuple[str, ...] = ()
    nodes: int = 0
    not_before: float = 0.0

    def as_record(self) -> dict[str, Any]:
        return {"v": 1, **self._asdict(), "exclude": list(self.exclude)}


def plan_from(raw: bytes) -> RequeuePlan:
    """Read a file's bytes. Raises ValueError for all that robust-srun would not have written."""
    try:
        found = json.loads(raw)
    except RecursionError as error:
        raise ValueError("brackets without end") from error
    if not isinstance(found, dict) or found.get("v") != 1:
        raise ValueError("no plan of a requeue")
    counts: list[Any] = [found.get(key) for key in ("restarts", "nodes")]
    exclude: Any = found.get("exclude")
    not_before: Any = found.get("not_before")
    for count in counts:
        if type(count) is not int or not 0 <= count < 1 << 31:
            raise ValueError("restarts or nodes is no count")
    if type(not_before) not in (int, float) or not 0 <= not_before < 1e11:
        raise ValueError("not_before is no time")
    if not _names(exclude):
        raise ValueError("exclude is no list of nodes")
    return RequeuePlan(counts[0], tuple(exclude), counts[1], math.ceil(not_before))


def _names(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > _MOST_NODES:
        return False
    return all(isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME for name in value)
