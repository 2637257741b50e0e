"""Users' records in the state directory, coerced to types: hostile input becomes plain values.

A value of the wrong type, a number made to hurt, control characters in a text: each is dropped or
replaced here, so that everything behind this module can be counted, printed and dumped as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from robust_slurm.state_dir.data_record import DataRecord, data_from
from robust_slurm.state_dir.plain import MAX_TEXT as MAX_TEXT
from robust_slurm.state_dir.plain import clean as clean
from robust_slurm.state_dir.plain import decode as decode
from robust_slurm.state_dir.plain import moment as moment
from robust_slurm.state_dir.plain import number as number
from robust_slurm.state_dir.plain import whole as whole
from robust_slurm.state_dir.plain import words as words

MAX_MEMBERS = 20_000  # nodes of a roster, where nobody knows how many Slurm has
MAX_NODE_RANKS = 1024  # of one node

_FORMER_ACTIONS = {"swap_companion": "swap_standby"}  # of records written before 0.1.0


@dataclass(frozen=True)
class Member:
    """A node of a job, as the supervisor sees it."""

    name: str
    job_id: int  # the allocation that it belongs to (a standby node's differs from the job's)
    role: str
    ranks: tuple[int, ...]
    silent_s: float | None
    warm: int = 0  # ranks that would start warm


@dataclass(frozen=True)
class Checkpoint:
    """The state of a step's checkpoints: newest steps that all ranks have, None for none yet."""

    step: int | None  # in memory
    replicated: int | None  # on another node as well
    durable: int | None  # on disk
    certified: int | None  # the newest of those that are certified
    survives: str
    directory: str
    bytes: int  # of a rank's snapshot
    every: str  # why not every step is in memory; empty: every step is
    blocked_s: float  # for which its last snapshot kept the slowest rank from training


@dataclass(frozen=True)
class Roster:
    """One supervised step at its last report. Times are seconds since 1970."""

    job_id: int
    step_id: str
    job_name: str
    user: str
    state: str
    epoch: int
    updated: float
    started: float | None
    host: str
    world_size: int
    ranks: int  # with those that a torchrun in a task slot has started
    step: int | None
    step_time_s: float | None
    nodes: tuple[Member, ...]
    incidents: int
    lost_steps: int | None  # None: not known
    unproductive_s: float | None
    ettr: float | None
    note: str
    estimated: bool = False  # unproductive_s and ettr, and lost_steps where it is known
    checkpoint: Checkpoint | None = None
    data: DataRecord | None = None


NOT_STOPPED = ("warned", "observed")
"""Openings of the outcome of an incident for which robust-srun stopped no rank."""


def stays(outcome: str, symptom: str) -> bool:
    """True if the node that such an incident blames is still in its job: a lost one is not."""
    return outcome.startswith(NOT_STOPPED) and symptom != "node_lost"


@dataclass(frozen=True)
class IncidentRecord:
    """One line of incidents.jsonl; phases in seconds."""

    id: str
    step_id: str
    epoch: int
    time: float
    symptom: str
    cause: str
    suspects: tuple[str, ...]
    evidence: tuple[str, ...]
    action: str
    outcome: str
    phases: Mapping[str, float]
    lost_steps: int | None
    lost_s: float | None = None  # s of training that were lost, by an estimate
    estimate: str = ""  # what lost_s and lost_steps were estimated by; "": nothing is an estimate
    steps_seen: bool = True  # False: no step was seen after the restart
    restored: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()  # what tests of the machines said
    rule: str = ""  # id of the rule of diagnosis that decided; "" in older records
    rung: str = ""  # id of the ladder's rung that was chosen; "" in older records
    swaps: tuple[tuple[str, str], ...] = ()  # nodes that left, and the nodes in their places
    counters: tuple[str, ...] = ()  # error counters of nodes that have grown
    why: str = ""  # why the ladder chose the action
    ranks: int = 0  # that were started again
    warm: int = 0  # of them with everything imported ahead
    resized: tuple[int, ...] = ()  # numbers of ranks before and after, if they differ
    kept: int = 0  # of them in the process that they had before
    amended: tuple[str, ...] = ()  # what withdrawals have corrected in the record since


@dataclass(frozen=True)
class NodeReport:
    """A job's report of a node."""

    node: str
    job_id: int
    user: str
    time: float
    symptom: str
    evidence: tuple[str, ...]
    incident: str
    withdrawn: str = ""  # why it was wrong, as the job says
    rule: str = ""  # id of the rule of diagnosis behind it; "" in older records
    withdrawn_at: float | None = None
    cause: str = ""  # of the incident, as a withdrawal corrects it


def roster_from(data: object, nodes: int = MAX_MEMBERS) -> Roster | None:
    """A roster, or None when job id or time are missing. ``nodes``: the most that it may have."""
    if not isinstance(data, dict):
        return None
    job_id, updated = whole(data.get("job_id")), moment(data.get("updated"))
    if job_id is None or updated is None:
        return None
    supervisor = data.get("supervisor")
    return Roster(
        job_id=job_id,
        step_id=clean(data.get("step_id"), 40),
        job_name=clean(data.get("job_name"), 100),
        user=clean(data.get("user"), 60),
        state=clean(data.get("state"), 20),
        epoch=whole(data.get("epoch")) or 0,
        updated=updated,
        started=moment(data.get("started")),
        host=clean(supervisor.get("host"), 255) if isinstance(supervisor, dict) else "",
        world_size=whole(data.get("world_size")) or 0,
        ranks=whole(data.get("ranks")) or whole(data.get("world_size")) or 0,
        step=whole(data.get("step")),
        step_time_s=number(data.get("step_time_s")),
        nodes=tuple(_members(data.get("nodes"), job_id, nodes)),
        incidents=whole(data.get("incidents")) or 0,
        lost_steps=whole(data.get("lost_steps")),
        unproductive_s=number(data.get("unproductive_s")),
        ettr=number(data.get("ettr")),
        note=clean(data.get("note")),
        estimated=data.get("estimated") is True,
        checkpoint=_checkpoint(data.get("checkpoint")),
        data=data_from(data.get("data")),
    )


def _checkpoint(data: object) -> Checkpoint | None:
    if not isinstance(data, dict):
        return None
    return Checkpoint(
        step=whole(data.get("step")),
        replicated=whole(data.get("replicated")),
        durable=whole(data.get("durable")),
        certified=whole(data.get("certified")),
        survives=clean(data.get("survives")),
        directory=clean(data.get("directory")),
        bytes=whole(data.get("bytes")) or 0,
        every=clean(data.get("why_every"), 200),
        blocked_s=number(data.get("blocked_s")) or 0.0,
    )


def _members(data: object, job_id: int, most: int) -> Iterator[Member]:
    for item in data[:most] if isinstance(data, list) else ():
        if isinstance(item, dict) and (name := clean(item.get("name"), 255)):
            ranks = item.get("ranks")
            listed = ranks[:MAX_NODE_RANKS] if isinstance(ranks, list) else []
            own = whole(item.get("job_id"))
            yield Member(
                name=name,
                job_id=job_id if own is None else own,
                role=clean(item.get("role"), 20),
                ranks=tuple(r for r in map(whole, listed) if r is not None),
                silent_s=number(item.get("silent_s")),
                warm=whole(item.get("warm")) or 0,
            )


def incident_from(data: object) -> IncidentRecord | None:
    """An incident, or None when its time is missing."""
    if not isinstance(data, dict) or (when := moment(data.get("time"))) is None:
        return None
    phases = data.get("phases")
    pairs = phases.items() if isinstance(phases, dict) else ()
    return IncidentRecord(
        id=clean(data.get("id"), 60),
        step_id=clean(data.get("step_id"), 40),
        epoch=whole(data.get("epoch")) or 0,
        time=when,
        symptom=clean(data.get("symptom"), 40),
        cause=clean(data.get("cause"), 40),
        suspects=words(data.get("suspects"), 255),
        evidence=words(data.get("evidence"), MAX_TEXT),
        action=_FORMER_ACTIONS.get(action := clean(data.get("action"), 40), action),
        outcome=clean(data.get("outcome"), 100),
        phases={clean(k, 30): s for k, v in list(pairs)[:30] if (s := number(v)) is not None},
        lost_steps=whole(data.get("lost_steps")),
        lost_s=number(data.get("lost_s")),
        estimate=clean(data.get("estimate")),
        steps_seen=data.get("steps_seen") is not False,
        restored=words(data.get("restored") or [], MAX_TEXT),
        tests=words(data.get("tests") or [], MAX_TEXT),
        rule=clean(data.get("rule"), 40),
        rung=clean(data.get("rung"), 40),
        swaps=tuple(_pairs(data.get("swaps"))),
        counters=words(data.get("counters") or [], MAX_TEXT),
        why=clean(data.get("why")),
        ranks=whole(data.get("ranks")) or 0,
        warm=whole(data.get("warm")) or 0,
        resized=_two(data.get("resized")),
        kept=whole(data.get("kept")) or 0,
    )


def _two(value: object) -> tuple[int, ...]:
    """Two numbers of ranks, or ()."""
    found = [n for n in map(whole, value) if n is not None] if isinstance(value, list) else []
    return tuple(found) if len(found) == 2 and min(found) > 0 else ()


def node_report_from(data: object) -> NodeReport | None:
    """A report, or None when node or time are missing."""
    if not isinstance(data, dict) or (when := moment(data.get("time"))) is None:
        return None
    node = clean(data.get("node"), 255)
    if not node:
        return None
    return NodeReport(
        node=node,
        job_id=whole(data.get("job")) or 0,
        user=clean(data.get("user"), 60),
        time=when,
        symptom=clean(data.get("symptom"), 40),
        evidence=words(data.get("evidence"), MAX_TEXT),
        incident=clean(data.get("incident"), 60),
        withdrawn=clean(data.get("withdrawn")),
        rule=clean(data.get("rule"), 40),
        cause=clean(data.get("cause"), 40),
    )


def amend(
    incidents: Sequence[IncidentRecord], withdrawals: Iterable[NodeReport]
) -> list[IncidentRecord]:
    """Correct incidents by the withdrawals of their reports: cause, suspects, a line that says so.

    The cause changes once no suspect is left. A requeued job counts its incidents anew: of several
    with the same id, the nearest in time is meant.
    """
    found = list(incidents)
    for back in sorted(withdrawals, key=lambda one: one.time):
        same = [n for n, one in enumerate(found) if one.id == back.incident]
        if not same or not back.cause:  # an older record does not know the cause
            continue
        at = min(same, key=lambda n: abs(found[n].time - back.time))
        one = found[at]
        left = tuple(name for name in one.suspects if name != back.node)
        line = f"the report against {back.node} is withdrawn: {back.withdrawn or 'wrong'}"
        cause = one.cause if left else back.cause
        found[at] = replace(one, suspects=left, cause=cause, amended=(*one.amended, line))
    return found


def _pairs(value: object) -> Iterator[tuple[str, str]]:
    for item in value[:1000] if isinstance(value, list) else ():
        names = words(item, 255)
        if len(names) == 2:
            yield names[0], names[1]


def incidents_from(raw: bytes) -> tuple[list[IncidentRecord], int, bool]:
    """The incidents of a file's text, how many lines were unreadable, whether the last was torn."""
    *lines, last = raw.split(b"\n")
    found: list[IncidentRecord] = []
    bad = 0
    for line in lines:
        if not line.strip():
            continue
        incident = incident_from(decode(line))
        if incident is None:
            bad += 1
        else:
            found.append(incident)
    return found, bad, bool(last.strip())
