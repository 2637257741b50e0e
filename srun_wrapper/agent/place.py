"""A shim's place in the real step, and the values derived from it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from srun_wrapper.command.rank_env import parse_tasks_per_node
from srun_wrapper.protocol.messages import Start

SECRETS = ("ROBUST_STEP_KEY", "ROBUST_PORT", "ROBUST_STANDBY_REQUEST")
"""Variables of a shim's environment that its rank does not get."""


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
    standby_request: int
    server: str  # the supervisor's host
    port: int


def place_from(env: Mapping[str, str]) -> Place:
    """Read Slurm's environment of a task. Raises KeyError/ValueError if it is not one."""
    index = int(env["SLURM_NODEID"])
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
    return Place(
        job_id=int(env["SLURM_JOB_ID"]),
        step_id=env["SLURM_STEP_ID"],
        node_index=index,
        node=env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        local=int(env["SLURM_LOCALID"]),
        task=int(env["SLURM_PROCID"]),
        local_tasks=parse_tasks_per_node(per_node)[index],
        step_nodes=int(env["SLURM_STEP_NUM_NODES"]),
        step_tasks=int(env["SLURM_STEP_NUM_TASKS"]),
        standby_request=int(env.get("ROBUST_STANDBY_REQUEST", "0")),
        server=env["SLURM_LAUNCH_NODE_IPADDR"],
        port=int(env["ROBUST_PORT"]),
    )


def job_of(place: Place, start: Start) -> int:
    """Return the id of the job that the ranks belong to; a standby allocation has another id."""
    return int(start.env.get("SLURM_JOB_ID", place.job_id))


def shims_socket(run_dir: Path, place: Place) -> str:
    """Return the path on which a node's agent listens for the other shims.

    It is in the agent's private directory, which has a new name each time that an agent starts: an
    abstract name would be anybody's as soon as the agent has died.
    """
    return str(run_dir / f"shims-{place.node_index}.sock")
