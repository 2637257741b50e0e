"""Divide a job's time into segments, from its records. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from robust_slurm.state_dir.progress import JobRun, Point
from robust_slurm.state_dir.records import NOT_STOPPED, IncidentRecord
from robust_slurm.text import counted
from status.accounts.segments import (
    INCIDENT_PHASES,
    REDONE,
    TRAINING,
    Segment,
    degraded,
    filled,
    in_order,
)

RECOVERED = "recovered"
MOST_REDONE = 365 * 86400.0  # s; a record of more is not believed
PARTS = 1_000_000  # of a GPU: shares of the ranks are rounded to it
UNSEEN = 600_000  # ms after the ranks' start without a step: no step of the program is seen
CLOCKS = 2.0  # s that an incident may lie before its run, by rounding


@dataclass(frozen=True)
class JobAccount:
    """A job's time. ``segments`` cover [begin, end) without gap or overlap."""

    job_id: int
    name: str
    user: str
    uid: int
    partition: str
    gpus: int
    begin: int  # ms since 1970
    end: int
    live: bool
    incidents: tuple[IncidentRecord, ...]
    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()
    estimated: bool = False  # the time without new steps is an estimate

    @property
    def elapsed(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class JobHistory:
    """A job's records, as far as they tell of time.

    ``spans``: start and end (None: it runs) of each time that Slurm ran the job, where sacct knows.
    """

    job_id: int
    name: str
    user: str
    uid: int
    live: bool
    runs: Sequence[JobRun]
    incidents: Sequence[IncidentRecord]
    spans: Sequence[tuple[float, float | None]] = ()
    step_time: float | None = None  # of the newest report
    notes: Sequence[str] = field(default_factory=tuple)


def account(of: JobHistory, now: float) -> JobAccount:
    """Return the account of a job's time until ``now``, or until it ended."""
    runs = _apart(of.runs, now, of.live)
    spans = [(ms(start), ms(now if end is None else end)) for start, end in of.spans]
    edges = [*((r.begin, r.end) for r in runs), *spans]
    begin, end = min(b for b, _ in edges), max(e for _, e in edges)
    incidents = tuple(sorted(of.incidents, key=lambda i: i.time))
    taken: list[Segment] = []
    notes, unseen = list(of.notes), False
    unknown = sum(i.outcome == RECOVERED and i.lost_steps is i.lost_s is None for i in incidents)
    if unknown:
        times = counted(unknown, "recovery", "recoveries")
        notes.append(f"steps done twice after {times} are not known, and not counted")
    guesses = sum(bool(i.estimate) for i in incidents)
    if guesses:
        times = counted(guesses, "recovery", "recoveries")
        notes.append(f"what {times} lost is estimated by the newest file that the program wrote")
    begins = [run.begin for run in runs]
    where = [_run_of(one, begins) for one in incidents]
    for number, run in enumerate(runs):
        mine = [n for n, at in enumerate(where) if at == number]
        if run.first is None and _trains_unseen(run, [incidents[n] for n in mine]):
            run.first, unseen = run.launched, True
        taken += _of_run(run, incidents, mine, _requeued_before(incidents, run.begin), of.step_time)
    if unseen:
        notes.append(
            "no step of the program is seen: it is taken to train while its ranks run "
            "(--robust-progress-regex, robust_slurm.beat)"
        )
    whole = _between(taken, runs, spans, incidents, begin, end)
    gpus = runs[-1].gpus
    partition = next((r.partition for r in reversed(of.runs) if r.partition), "")
    return JobAccount(
        of.job_id,
        of.name,
        of.user,
        of.uid,
        partition,
        gpus,
        begin,
        end,
        of.live,
        incidents,
        tuple(whole),
        tuple(notes),
        bool(guesses or unseen),
    )


def _trains_unseen(run: _JobRun, incidents: Sequence[IncidentRecord]) -> bool:
    """Return whether a run without a step that was seen is taken to train all the same."""
    if run.launched is None:
        return False
    if incidents:
        return any(i.outcome == RECOVERED and not i.steps_seen for i in incidents)
    return run.completed or run.end - run.launched >= UNSEEN


def ms(seconds: float) -> int:
    return round(seconds * 1000)


Size = tuple[int, int, int]
"""Since when (ms), with how many ranks, of how many."""


@dataclass
class _JobRun:
    begin: int
    end: int
    first: int | None
    gpus: int
    points: Sequence[Point]
    launched: int | None = None
    completed: bool = False
    sizes: Sequence[Size] = ()  # see ``degraded``
    detected: list[int] = field(default_factory=list)


def _apart(runs: Sequence[JobRun], now: float, live: bool) -> list[_JobRun]:
    """The runs, one after the other: those that overlap (steps side by side) become one."""
    done: list[_JobRun] = []
    beside: list[list[tuple[Sequence[Size], int]]] = []  # the sizes of those that become one
    for number, run in enumerate(sorted(runs, key=lambda one: one.started)):
        last = number == len(runs) - 1
        heard = max((point.time for point in run.points), default=run.started)
        until = run.ended if run.ended is not None else now if last and live else heard
        begin, end = ms(run.started), ms(max(until, run.started))
        first = None if run.first_step is None else ms(run.first_step)
        gpus = run.gpus or run.ranks
        sizes = [(ms(since), now, of) for since, now, of in run.sizes]
        launched = None if run.launched is None else min(max(ms(run.launched), begin), end)
        done_well = run.state == "completed"
        one = _JobRun(begin, end, first, gpus, run.points, launched, done_well, sizes)
        if done and begin < done[-1].end:
            before = done[-1]
            firsts = [f for f in (before.first, first) if f is not None]
            one.begin, one.end = before.begin, max(before.end, end)
            one.first, one.gpus = min(firsts, default=None), before.gpus + gpus
            launches = [at for at in (before.launched, launched) if at is not None]
            one.launched = min(launches, default=None)
            one.completed = one.completed and before.completed
            one.points = (*before.points, *run.points)
            done[-1] = one
            beside[-1].append((sizes, gpus))
        else:
            done.append(one)
            beside.append([(sizes, gpus)])
    for one, each in zip(done, beside, strict=True):
        one.sizes = each[0][0] if len(each) == 1 else _side_by_side(each)
    return done


def _side_by_side(runs: Sequence[tuple[Sequence[Size], int]]) -> list[Size]:
    """The sizes of runs that become one: each run's share counts by its GPUs."""
    left = everything = sum(gpus for _, gpus in runs) * PARTS
    now_of = dict.fromkeys(range(len(runs)), PARTS)
    changes = sorted(
        (since, number, now * PARTS // of)
        for number, (sizes, _) in enumerate(runs)
        for since, now, of in sizes
    )
    found: list[Size] = []
    for since, number, share in changes:
        left += (share - now_of[number]) * runs[number][1]
        now_of[number] = share
        found.append((since, left, everything))
    return found


def _run_of(incident: IncidentRecord, begins: Sequence[int]) -> int:
    """The run that an incident belongs to: the last one that had begun."""
    return max(bisect_right(begins, ms(incident.time + CLOCKS)) - 1, 0)


def _requeued_before(incidents: Sequence[IncidentRecord], when: int) -> int:
    """The incident that requeued the job before this time; -1: none did."""
    found = [n for n, i in enumerate(incidents) if i.outcome == "requeued" and ms(i.time) <= when]
    return found[-1] if found else -1


def _of_run(
    run: _JobRun,
    incidents: Sequence[IncidentRecord],
    mine: Sequence[int],
    behind: int,
    step_time: float | None,
) -> list[Segment]:
    first = run.end if run.first is None else min(max(run.first, run.begin), run.end)
    wanted = [_caused(run.begin, first, "start_up", "start", incidents, behind)]
    for number in mine:
        incident = incidents[number]
        if incident.outcome.startswith(NOT_STOPPED):
            continue
        wanted += _phases(incident, number)
        end = wanted[-1].end
        if incident.outcome == RECOVERED:
            again = ms(redone(incident, run.points, step_time))
            wanted.append(_caused(end, end + again, REDONE, "", incidents, number))
        elif number == mine[-1]:
            wanted.append(_caused(end, run.end, "ending", "", incidents, number))
    taken = in_order(wanted, run.begin, run.end)
    training = Segment(0, 0, TRAINING)
    whole = degraded(filled(taken, run.begin, run.end, training), run.sizes)
    return [replace(one, gpus=run.gpus) for one in whole]


def _phases(incident: IncidentRecord, number: int) -> Iterator[Segment]:
    """The phases of an incident, one after the other, also those without any time."""
    at = ms(incident.time - incident.phases.get("detect", 0.0))
    total = at + ms(max(0.0, incident.phases.get("total", 0.0)))
    for phase in INCIDENT_PHASES:
        until = min(total, at + ms(max(0.0, incident.phases.get(phase, 0.0))))
        if phase == INCIDENT_PHASES[-1]:
            until = max(until, total)  # what rounding has left
        yield _caused(at, until, phase, "", [incident], 0, number)
        at = until


def _caused(
    begin: int,
    end: int,
    phase: str,
    otherwise: str,
    incidents: Sequence[IncidentRecord],
    at: int,
    number: int | None = None,
) -> Segment:
    """A segment that an incident caused; without one (``at`` < 0) its cause is ``otherwise``."""
    if at < 0:
        return Segment(begin, end, phase, otherwise)
    one = incidents[at]
    number = at if number is None else number
    cause = one.cause or "unknown"
    return Segment(begin, end, phase, cause, one.symptom, number, blamed(one))


def blamed(incident: IncidentRecord) -> tuple[str, ...]:
    """The nodes that an incident names: those that left, else its suspects."""
    left = tuple(dict.fromkeys(old for old, _ in incident.swaps))
    return left or tuple(dict.fromkeys(incident.suspects))


def redone(incident: IncidentRecord, points: Sequence[Point], step_time: float | None) -> float:
    """Seconds for the steps that were done twice, by the pace before the incident."""
    steps = incident.lost_steps
    if steps is None and incident.lost_s is not None:
        return min(MOST_REDONE, max(0.0, incident.lost_s))
    if not steps or steps < 0:
        return 0.0
    before = [p.step_time_s for p in points if p.time <= incident.time and p.step_time_s]
    pace = before[-1] if before else step_time
    return min(MOST_REDONE, steps * pace) if pace and pace > 0 else 0.0


def _between(
    taken: Sequence[Segment],
    runs: Sequence[_JobRun],
    spans: Sequence[tuple[int, int]],
    incidents: Sequence[IncidentRecord],
    begin: int,
    end: int,
) -> list[Segment]:
    """Fill the time outside of robust-srun: in Slurm's queue, or in the job's script."""
    known = in_order([Segment(b, e, "script", "script") for b, e in spans], begin, end)
    whole: list[Segment] = []
    for one in filled(taken, begin, end, Segment(0, 0, "")):
        if one.phase:
            whole.append(one)
            continue
        gpus = next((r.gpus for r in runs if r.begin >= one.end), runs[-1].gpus)
        behind = _requeued_before(incidents, one.begin)
        queued = _caused(0, 0, "queued", "queue", incidents, behind)
        if not spans and behind < 0:
            queued = Segment(0, 0, "script", "script")  # between two steps of the job
        scripts = [s for s in known if s.end > one.begin and s.begin < one.end]
        part = filled(in_order(scripts, one.begin, one.end), one.begin, one.end, queued)
        whole += [replace(each, gpus=gpus) for each in part]
    return whole
