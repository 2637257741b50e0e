"""The report: state files and Slurm's answers in, rows out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from robust_slurm.settings import SHOWN_STALE
from robust_slurm.slurm.model import FINISHED, JobPlacement, SlurmNode
from robust_slurm.state_dir.data_record import DataRecord
from robust_slurm.state_dir.records import Checkpoint, IncidentRecord, NodeReport, Roster, clean
from standby.pool.stock import Pool, PoolStock, stock

STALE_S = SHOWN_STALE  # a supervisor reports every roster_interval, at most a third of it
REQUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD")
ENDED = {  # Slurm's last states of a job, in our words
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "timed out",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
}
NO_RECORDS = "no records"  # begins the note that there is no state directory to read
LIVE = ("starting", "running", "recovering", "terminating", "requeued", "silent")


@dataclass(frozen=True)
class SlurmView:
    """Slurm's answers, or why there are none (``error``)."""

    nodes: Mapping[str, SlurmNode] | None = None
    partitions: tuple[str, ...] | None = None
    job_states: Mapping[int, str] | None = None
    owners: Mapping[int, int] | None = None  # uid of each job
    places: Mapping[int, JobPlacement] | None = None  # asked for where there is a pool
    error: str = ""


@dataclass(frozen=True)
class NodeRow:
    """One node. ``state`` is Slurm's set of flags, sorted; empty when Slurm was not heard."""

    name: str
    state: tuple[str, ...]
    reason: str
    pool: str  # "train", "standby", or "" when Slurm was not heard
    accusations: int
    newest_evidence: str
    newest_time: float | None
    withdrawn: int = 0  # reports that their jobs took back


@dataclass(frozen=True)
class JobRow:
    """One supervised step. ``status`` is its roster's word, "silent" or "ended"."""

    job_id: int
    step_id: str
    name: str
    user: str
    status: str
    slurm_state: str  # "" when Slurm was not heard or has forgotten the job
    updated: float
    silent_s: float
    nodes: tuple[dict[str, Any], ...]
    world_size: int
    ranks: int
    step: int | None
    step_time_s: float | None
    epoch: int
    incidents: int
    lost_steps: int | None
    unproductive_s: float | None
    ettr: float | None
    note: str
    checkpoint: Checkpoint | None
    data: DataRecord | None = None
    estimated: bool = False  # unproductive_s and ettr, and lost_steps where it is known

    @property
    def live(self) -> bool:
        return self.status in LIVE


@dataclass(frozen=True)
class StatusReport:
    """The facts that robust-status prints. ``slurm_error`` is empty when Slurm answered."""

    time: float
    slurm_error: str
    nodes: tuple[NodeRow, ...]
    jobs: tuple[JobRow, ...]
    problems: tuple[str, ...]
    pool: PoolStock | None = None  # None: robust-standby keeps none, or Slurm was not heard


@dataclass(frozen=True)
class JobReport:
    """The facts that robust-status prints about one job."""

    time: float
    slurm_error: str
    job_id: int
    steps: tuple[JobRow, ...]
    incidents: tuple[IncidentRecord, ...]
    problems: tuple[str, ...]
    log: str = ""  # robust-srun's log of the job, if there is one


def status_of(roster: Roster, slurm: SlurmView, now: float) -> str:
    """Return the state of a step, as far as its last report and Slurm together tell.

    A supervisor's final report is the step's state, but only Slurm knows who cancelled it: a user,
    the time limit, or a requeue. If the last report is old and not final, the step has ended if
    Slurm does not run its job; if Slurm runs the job, or could not be asked, the supervisor is
    silent.
    """
    state = (slurm.job_states or {}).get(roster.job_id, "")
    if roster.state in ("completed", "failed"):
        return roster.state
    if roster.state == "cancelled":
        return ENDED.get(state, "requeued" if state in REQUEUED else "cancelled")
    if state in FINISHED:
        return ENDED.get(state, "ended")
    if now - roster.updated <= STALE_S:
        return roster.state
    if slurm.job_states is None:
        return "silent"
    if roster.state == "requeued" and state in (*REQUEUED, "COMPLETING"):
        return "requeued"
    return "silent" if state == "RUNNING" else "ended"


def job_row(roster: Roster, slurm: SlurmView, now: float) -> JobRow:
    states = slurm.job_states or {}
    return JobRow(
        job_id=roster.job_id,
        step_id=roster.step_id,
        name=roster.job_name,
        user=roster.user,
        status=status_of(roster, slurm, now),
        slurm_state=states.get(roster.job_id, ""),
        updated=roster.updated,
        silent_s=max(0.0, now - roster.updated),
        nodes=tuple(asdict(member) for member in roster.nodes),
        world_size=roster.world_size,
        ranks=roster.ranks,
        step=roster.step,
        step_time_s=roster.step_time_s,
        epoch=roster.epoch,
        incidents=roster.incidents,
        lost_steps=roster.lost_steps,
        unproductive_s=roster.unproductive_s,
        ettr=roster.ettr,
        note=roster.note,
        checkpoint=roster.checkpoint,
        data=roster.data,
        estimated=roster.estimated,
    )


def _node_rows(
    rosters: Iterable[Roster],
    reports: Iterable[NodeReport],
    slurm: SlurmView,
    standby_partition: str,
) -> list[NodeRow]:
    against: dict[str, list[NodeReport]] = {}
    for report in reports:
        against.setdefault(report.node, []).append(report)
    if slurm.nodes is not None:  # a name in a file is a node only if Slurm knows it
        names = list(slurm.nodes)
    else:
        names = sorted({m.name for roster in rosters for m in roster.nodes} | set(against))
    return [
        _node_row(name, (slurm.nodes or {}).get(name), against.get(name, []), standby_partition)
        for name in names
    ]


def _node_row(
    name: str, node: SlurmNode | None, against: Sequence[NodeReport], standby_partition: str
) -> NodeRow:
    standing = [report for report in against if not report.withdrawn]
    newest = max(standing or against, key=lambda report: report.time, default=None)
    evidence = ""
    if newest is not None:
        told = newest.evidence[-1] if newest.evidence else newest.symptom
        if newest.withdrawn:
            told = f"withdrawn: {newest.withdrawn}"
        evidence = f"job {newest.job_id}: {told}"
    pool = ""
    if node is not None:
        pool = "standby" if standby_partition in node.partitions else "train"
    return NodeRow(
        name=name,
        state=tuple(sorted(node.state)) if node else (),
        reason=clean(node.reason_in_force if node else ""),
        pool=pool,
        accusations=len(standing),
        withdrawn=len(against) - len(standing),
        newest_evidence=evidence,
        newest_time=newest.time if newest else None,
    )


def report(
    rosters: Sequence[Roster],
    reports: Sequence[NodeReport],
    problems: Sequence[str],
    slurm: SlurmView,
    standby_partition: str,
    now: float,
    pool: Pool | None = None,
) -> StatusReport:
    """The whole cluster: every node, every live supervised step (newest job first)."""
    told = list(problems)
    if slurm.partitions is not None and standby_partition not in slurm.partitions:
        told.append(
            f"no partition {standby_partition!r} in Slurm: no job can borrow a standby node "
            "(set standby_partition in robust.toml)"
        )
    rows = [job_row(roster, slurm, now) for roster in rosters]
    live = sorted((r for r in rows if r.live), key=lambda r: (-r.job_id, r.step_id))
    return StatusReport(
        time=now,
        slurm_error=slurm.error,
        nodes=tuple(_node_rows(rosters, reports, slurm, standby_partition)),
        jobs=tuple(live),
        problems=tuple(told),
        pool=stock(pool, slurm.nodes or {}, slurm.places, now)
        if pool and slurm.places is not None
        else None,
    )


def job_report(
    job_id: int,
    rosters: Sequence[Roster],
    incidents: Sequence[IncidentRecord],
    problems: Sequence[str],
    slurm: SlurmView,
    now: float,
    log: str = "",
) -> JobReport:
    """One job: every step it had, ended ones too, and its incidents, oldest first."""
    return JobReport(
        time=now,
        slurm_error=slurm.error,
        job_id=job_id,
        steps=tuple(job_row(roster, slurm, now) for roster in rosters),
        incidents=tuple(incidents),
        problems=tuple(problems),
        log=log,
    )
