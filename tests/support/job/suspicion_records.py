"""Records of a node's suspicions: what jobs wrote, and what the node gate published."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from status_records import NOW, accusation, incident

from robust_slurm.state_dir.files import JobRecord
from robust_slurm.state_dir.node_events import NodeEvent, event_from
from robust_slurm.state_dir.records import incident_from, node_report_from, roster_from
from status.by_node import by_node
from status.story import Suspicion, suspicions

ADA, BOB, EVE = 20001, 20002, 20003
SWAP = {"swaps": [["n2", "n3"]], "rule": "node-lost"}


def job(
    number: int,
    reports: list[dict[str, Any]],
    incidents: list[dict[str, Any]],
    uid: int = ADA,
    rosters: list[dict[str, Any]] | None = None,
) -> JobRecord:
    """A job's records; each report and incident is given as its changes."""
    said = [node_report_from(accusation(job=number, **each)) for each in reports]
    had = [incident_from(incident(job=number, **{**SWAP, **each})) for each in incidents]
    seen = [roster_from(each) for each in rosters or []]
    return JobRecord(
        number,
        uid,
        tuple(one for one in said if one),
        tuple(one for one in had if one),
        tuple(one for one in seen if one),
    )


def event(kind: str, after: float, **data: Any) -> NodeEvent:
    """An event ``after`` seconds after the report of ``accusation()``, of job 7 and incident i1."""
    known = {"job": 7, "uid": ADA, "name": "n2.i1.json", **data}
    found = event_from({"time": NOW - 100 + after, "kind": kind, "boot": "", "data": known}, "n2")
    assert found is not None
    return found


def of_node(jobs: list[JobRecord], events: list[NodeEvent], node: str = "n2") -> list[Suspicion]:
    return suspicions(node, by_node(jobs).get(node, []), events)


class StateDir:
    """A state directory with records of jobs and of the gate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "nodes").mkdir(parents=True)

    def job(self, number: int, node: str = "n2", uid: int = -1, **changes: Any) -> Path:
        """A job that lost a node, reported it and went on; ``changes`` of its incident."""
        directory = self.path / "jobs" / str(number)
        (directory / "accusations").mkdir(parents=True)
        report = accusation(job=number, node=node, rule="node-lost")
        had = incident(job=number, suspects=[node], **{"swaps": [[node, "n3"]], **changes})
        (directory / "accusations" / f"{node}.i1.json").write_text(json.dumps(report))
        (directory / "incidents.jsonl").write_text(json.dumps({**had, "rule": "node-lost"}) + "\n")
        if uid >= 0 and os.geteuid() == 0:
            os.chown(directory, uid, uid)
        return directory

    def withdraw(self, number: int, node: str = "n2", why: str = "the same error on n3") -> None:
        path = self.path / "jobs" / str(number) / "accusations" / f"{node}.i1.withdrawn.json"
        record = accusation(job=number, node=node, time=NOW - 50, withdrawn=why)
        path.write_text(json.dumps(record))

    def publish(self, node: str, kind: str, after: float, **data: Any) -> None:
        line = {"time": NOW - 100 + after, "kind": kind, "boot": "b", "data": data}
        with (self.path / "nodes" / f"{node}.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
