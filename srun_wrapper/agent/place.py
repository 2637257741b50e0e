"""A shim's place in the real step, and the values derived from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from srun_wrapper.protocol.messages import Start


@dataclass(frozen=True, slots=True)
class Place:
    """Place of this shim in the real step, from Slurm's environment."""

    job_id: int
    step_id: str
    node_index: int
    node: str
    local: int
    task: int
    local_tasks: int
    step_nodes: int
    step_tasks: int
    companion: int
    server: str  # the supervisor's host
    port: int


def job_of(place: Place, start: Start) -> int:
    """The job that the ranks belong to; a companion's own allocation is another one."""
    return int(start.env.get("SLURM_JOB_ID", place.job_id))


def shim_address(key: bytes, place: Place) -> bytes:
    """Abstract socket name that only holders of the step's key can compute."""
    where = f"{place.job_id}.{place.step_id}.{place.node_index}".encode()
    return b"\0robust-" + hashlib.blake2b(where, key=key[:64], digest_size=16).hexdigest().encode()
