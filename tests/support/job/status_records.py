"""Records of a job as robust-srun writes them, and a view of Slurm, for tests of robust-status."""

from __future__ import annotations

from typing import Any

from robust_slurm.slurm.model import SlurmNode, node_from
from status.model import SlurmView

NOW = 1_800_000_000.0


def roster(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "job_id": 7,
        "step_id": "0",
        "job_name": "llm",
        "user": "ada",
        "state": "running",
        "epoch": 2,
        "updated": NOW - 1,
        "started": NOW - 500,
        "supervisor": {"host": "n1", "pid": 5},
        "world_size": 4,
        "step": 120,
        "step_time_s": 0.25,
        "nodes": [
            {"name": "n1", "job_id": 7, "role": "active", "ranks": [0, 1], "silent_s": 0.2},
            {"name": "n3", "job_id": 8, "role": "active", "ranks": [2, 3], "silent_s": 0.2},
            {"name": "n2", "job_id": 7, "role": "released", "ranks": [], "silent_s": 99.0},
        ],
        "incidents": 1,
        "lost_steps": 3,
        "unproductive_s": 5.5,
        "ettr": 0.989,
        "note": "",
        **changes,
    }


def incident(**changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "id": "i1",
        "job": 7,
        "step_id": "0",
        "epoch": 1,
        "time": NOW - 100,
        "symptom": "node_lost",
        "cause": "node",
        "suspects": ["n2"],
        "evidence": ["silent for 3 s", "ping failed"],
        "action": "swap_standby",
        "outcome": "recovered",
        "phases": {"detect": 2.5, "decide": 0.01, "total": 5.5},
        "lost_steps": 3,
        **changes,
    }


def accusation(**changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "node": "n2",
        "job": 7,
        "user": "ada",
        "time": NOW - 100,
        "symptom": "node_lost",
        "evidence": ["silent for 3 s", "ping failed"],
        "incident": "i1",
        **changes,
    }


def node(name: str, state: str, partitions: str, reason: str = "") -> SlurmNode:
    record = {"NodeName": name, "State": state, "Partitions": partitions, "Reason": reason}
    return node_from(record)


NODES = {
    "n1": node("n1", "MIXED", "train"),
    "n2": node("n2", "DOWN+DRAIN+NOT_RESPONDING", "train", "robust: node_lost"),
    "n3": node("n3", "MIXED", "standby"),
    "n4": node("n4", "IDLE", "train,standby"),
}


def view(**states: str) -> SlurmView:
    numbered = {int(key[1:]): state for key, state in states.items()}
    return SlurmView(NODES, ("train", "standby"), numbered)
