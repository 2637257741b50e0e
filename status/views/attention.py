"""The nodes and jobs that need a person's look, the gravest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from robust_slurm.state_dir.data_record import DataRecord
from robust_slurm.state_dir.records import NodeReport
from robust_slurm.text import ago, span
from standby.pool.stock import told
from status.model import JobRow, NodeRow, StatusReport
from status.views.data import slowed, waits

RECENT = 7 * 86400.0  # s; an older report is no reason to look now
FLAPS = ("node_lost",)  # reports that are withdrawn because the node answered again
BAD = {"DOWN", "DRAIN", "FAIL", "ERROR", "NOT_RESPONDING", "INVALID_REG"}
JOB_STATES = ("recovering", "silent", "requeued")
_ORDER = (*("silent", "recovering", "requeued", "pool", "bad", "suspected", "data", "flapping"),)


@dataclass(frozen=True)
class Attention:
    """One thing to look at. ``kind``: see ``_ORDER``; ``name``: of the node or the job."""

    kind: str
    name: str
    text: str
    time: float = 0.0


def attention(report: StatusReport, reports: Sequence[NodeReport]) -> list[Attention]:
    """Return what needs attention, the gravest first, then the newest."""
    found = [_job(row) for row in report.jobs if row.status in JOB_STATES]
    found += [_data(row, row.data) for row in report.jobs if row.data and _waits(row)]
    pool = report.pool
    if pool is not None and pool.short:
        found.append(Attention("pool", pool.partition, told(pool).partition(": ")[2]))
    found += _nodes(report.nodes, reports, report.time)
    return sorted(found, key=lambda one: (_ORDER.index(one.kind), -one.time, one.name))


def _job(row: JobRow) -> Attention:
    text = {
        "recovering": "recovering from a fault",
        "silent": f"robust-srun has not reported for {span(row.silent_s)}",
        "requeued": "waits in Slurm's queue to start again",
    }[row.status]
    name = f"job {row.job_id}"
    return Attention(row.status, name, f"{row.name} of {row.user}: {text}", row.updated)


def _waits(row: JobRow) -> bool:
    return row.status == "running" and slowed(row.data)


def _data(row: JobRow, data: DataRecord) -> Attention:
    text = f"{row.name} of {row.user}: {waits(data)}"
    return Attention("data", f"job {row.job_id}", text, row.updated)


def _nodes(rows: Iterable[NodeRow], reports: Sequence[NodeReport], now: float) -> list[Attention]:
    against: dict[str, list[NodeReport]] = {}
    for one in reports:
        if now - one.time <= RECENT:
            against.setdefault(one.node, []).append(one)
    found = []
    for row in rows:
        own = sorted(against.get(row.name, []), key=lambda one: one.time)
        standing = [one for one in own if not one.withdrawn]
        flaps = [one for one in own if one.withdrawn and one.symptom in FLAPS]
        if BAD & set(row.state):
            state = "+".join(s for s in row.state if s in BAD).lower().replace("_", " ")
            why = row.reason or (_said(standing[-1], now) if standing else "no reason given")
            found.append(Attention("bad", row.name, f"{state}: {why}"))
        elif standing:
            one = standing[-1]
            more = f" ({len(standing)} reports)" if len(standing) > 1 else ""
            found.append(Attention("suspected", row.name, _said(one, now) + more, one.time))
        elif flaps:
            one = flaps[-1]
            times = f" ({len(flaps)} times)" if len(flaps) > 1 else ""
            text = f"job {one.job_id}, {ago(one.time, now)}: {one.withdrawn}{times}"
            found.append(Attention("flapping", row.name, text, one.time))
    return found


def _said(one: NodeReport, now: float) -> str:
    told = one.evidence[-1] if one.evidence else one.symptom.replace("_", " ")
    return f"job {one.job_id}, {ago(one.time, now)}: {told}"
