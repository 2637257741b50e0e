"""The records of all jobs, sorted by the nodes that they tell of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from robust_slurm.state_dir.files import JobRecord
from robust_slurm.state_dir.records import IncidentRecord, NodeReport

MOST = 8  # reports of one job against one node: the node gate looks at no more either
INCIDENTS = 1000  # of one job, the newest
SWAPS = 64  # of one incident


def left(incident: IncidentRecord) -> set[str]:
    """The nodes that left the job in an incident."""
    gone = {old for old, _ in incident.swaps[:SWAPS]}
    return gone.union(incident.suspects if incident.outcome == "requeued" else ())


def warned(incident: IncidentRecord) -> set[str]:
    """The nodes that an incident names as slow; nothing was done about them."""
    return set(incident.suspects[:SWAPS]) if incident.outcome == "warned" else set()


def by_node(jobs: Iterable[JobRecord]) -> dict[str, list[JobRecord]]:
    """For each node the jobs that suspected or replaced it, with what they say of it alone."""
    found: dict[str, list[JobRecord]] = {}
    for job in jobs:
        job = replace(job, incidents=job.incidents[-INCIDENTS:])
        reports, gone = _reports(job), _gone(job)
        ids: dict[str, list[IncidentRecord]] = {}
        for incident in job.incidents:
            ids[incident.id] = [*ids.get(incident.id, [])[1 - MOST :], incident]
        for node in dict.fromkeys([*reports, *gone]):
            mine = sorted(reports.get(node, []), key=lambda one: one.time)[-MOST:]
            named = [i for key in dict.fromkeys(r.incident for r in mine) for i in ids.get(key, [])]
            incidents = {id(i): i for i in [*named, *gone.get(node, [])]}
            record = replace(job, reports=tuple(mine), incidents=tuple(incidents.values()))
            found.setdefault(node, []).append(record)
    return found


def _reports(job: JobRecord) -> Mapping[str, list[NodeReport]]:
    found: dict[str, list[NodeReport]] = {}
    for report in job.reports:
        found.setdefault(report.node, []).append(report)
    return found


def _gone(job: JobRecord) -> Mapping[str, list[IncidentRecord]]:
    found: dict[str, list[IncidentRecord]] = {}
    for incident in job.incidents:
        for node in left(incident) | warned(incident):
            found.setdefault(node, []).append(incident)
    return found
