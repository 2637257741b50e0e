"""The content of a job's page: from the account of its time and its records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from robust_slurm.state_dir.progress import JobRun, Point
from robust_slurm.text import counted
from status.accounts.segments import PHASE_NAMES, Segment
from status.accounts.sums import SHARES, curve, ettr, hours, lost, total, unproductive
from status.accounts.timeline import JobAccount
from status.model import JobReport
from status.report.charts import LEFT, RIGHT, WIDTH, Axis, Box, Marker, Plot, Tick, plot
from status.report.parts import MOST_INCIDENTS, Told, WorldPlace, incidents_told, places_of
from status.views.data import data_lines
from status.views.overview import clock, duration
from status.wording import about

KINDS = {  # colours of phases, see the template
    "training": "training",
    "detect": "detect",
    "decide": "detect",
    "stop": "stop",
    "test": "test",
    "replace": "replace",
    "restore": "restore",
    "launch": "launch",
    "first_step": "first",
    "redone": "redone",
    "start_up": "start",
    "queued": "queued",
    "script": "script",
    "degraded": "degraded",
    "ending": "ending",
}
MOST_PLACES = 2048
NARROW = 2.5  # units: the width at which a narrower stretch is drawn


class Tile(NamedTuple):
    name: str
    value: str
    more: str


class Row(NamedTuple):
    name: str
    kind: str
    time: str
    gpu_hours: str
    incidents: str
    share: float  # of the largest, in %


class Anatomy(NamedTuple):
    """A restart as a bar: boxes in units of the picture, and its length in words."""

    number: int
    y: float
    boxes: tuple[Box, ...]
    label: str
    end: float


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    status: str
    tiles: tuple[Tile, ...]
    axis: tuple[Tick, ...]
    bars: tuple[Box, ...]
    incarnations: tuple[Box, ...]
    marks: tuple[Marker, ...]
    plots: tuple[Plot, ...]
    anatomy: tuple[Anatomy, ...]
    legend: tuple[tuple[str, str], ...]
    tables: tuple[tuple[str, tuple[Row, ...]], ...]
    told: tuple[Told, ...]
    left_out: int
    places: tuple[WorldPlace, ...]
    places_left_out: int
    notes: tuple[str, ...]
    made: str


def page(
    job: JobAccount,
    report: JobReport,
    runs: Sequence[JobRun],
    recovering: bool,
    version: str,
    refresh: bool = False,
) -> Page:
    """Return all that the template shows."""
    axis = Axis(job.begin / 1000, max(job.end, job.begin + 1) / 1000)
    marks = _marks(job, axis)
    kinds = {s.phase for s in job.segments}
    legend = [(KINDS[p], PHASE_NAMES.get(p, p)) for p in KINDS if p in kinds and p != "decide"]
    places = places_of(runs, job.incidents)
    step = max(report.steps, key=lambda row: row.updated, default=None)
    status = "recovering" if recovering else step.status if step else ""
    about = [f"user {job.user}" if job.user else ""]
    about += [f"partition {job.partition}" if job.partition else ""]
    about += [counted(job.gpus, "GPU"), f"{clock(job.begin / 1000)} to {clock(job.end / 1000)}"]
    notes = [f"Slurm did not answer: {report.slurm_error}"] if report.slurm_error else []
    data = data_lines(step.data, step.step_id) if step and step.data and step.live else ()
    return Page(
        title=f"Job {job.job_id} {job.name}".rstrip(),
        subtitle=", ".join(part for part in about if part),
        status=status,
        tiles=_tiles(job, step.step if step else None),
        axis=axis.ticks(),
        bars=_bars(job, axis),
        incarnations=_incarnations(runs, axis),
        marks=marks,
        plots=tuple(p for p in (*_progress(runs, axis, marks), _ettr(job, axis, marks)) if p),
        anatomy=_anatomy(job),
        legend=tuple(legend),
        tables=tuple((name, _rows(job, name)) for name in ("phase", "cause", "node")),
        told=incidents_told(job, report.log, recovering),
        left_out=max(0, len(job.incidents) - MOST_INCIDENTS),
        places=places[:MOST_PLACES],
        places_left_out=max(0, len(places) - MOST_PLACES),
        notes=(*notes, *data, *job.notes, *report.problems),
        made=f"Made by robust-status {version} at {clock(report.time)}"
        + ("; this page loads itself anew." if refresh else "."),
    )


def _tiles(job: JobAccount, step: int | None) -> tuple[Tile, ...]:
    share, at = ettr(job), curve(job, points=1)
    restarts = [i for i in job.incidents if not i.outcome.startswith(("warned", "observed"))]
    gone = sum(s.gpu_ms for s in job.segments if not s.productive)
    known = [i.lost_steps for i in restarts if i.lost_steps is not None]
    again = about(str(sum(known)), any(i.estimate for i in restarts))
    if any(i.outcome == "recovered" and i.lost_steps is None for i in restarts):
        again = f"{again} known" if sum(known) else "not known"
    tiles = [
        Tile(
            "ETTR",
            "?" if share is None else about(f"{100 * share:.2f} %", job.estimated),
            "of the time made new steps",
        ),
        Tile("last hour", f"{100 * at.sliding[-1]:.2f} %" if at.sliding else "?", "sliding window"),
        Tile("restarts", str(len(restarts)), f"in {duration(job.elapsed / 1000)}"),
        Tile(
            "time lost",
            about(duration(unproductive(job) / 1000), job.estimated),
            "start-up included",
        ),
        Tile("GPU-hours lost", _few(hours(gone)), f"of {_few(hours(total([job]).gpu_ms))}"),
        Tile("steps done twice", again, "" if step is None else f"step {step} now"),
    ]
    return tuple(tiles)


def _few(value: float) -> str:
    """Like "0.07", "23.8", "5799"."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _bars(job: JobAccount, axis: Axis) -> tuple[Box, ...]:
    """Return the timeline: training as the background, the rest over it, at least NARROW wide."""
    boxes: list[Box] = []
    for one in sorted(job.segments, key=lambda s: (not s.productive, s.begin)):
        begin, end = axis.x(one.begin / 1000), axis.x(one.end / 1000)
        kind = KINDS.get(one.phase, "ending")
        width = end - begin
        if not one.productive and width < NARROW:
            if boxes and boxes[-1].kind != "training" and begin - boxes[-1].x < NARROW:
                continue  # one mark for all phases of a restart
            width = NARROW
        title = f"{PHASE_NAMES.get(one.phase, one.phase)}, {duration(one.ms / 1000)}"
        title += f": {one.cause}" if one.cause else ""
        boxes.append(Box(begin, 22.0, round(width, 2), 34.0, kind, title))
    return tuple(boxes)


def _incarnations(runs: Sequence[JobRun], axis: Axis) -> tuple[Box, ...]:
    """A strip below the timeline: each incarnation of the ranks, from its start to the next."""
    begins = [(p.time, f"run {n}, incarnation {p.epoch}") for n, run in enumerate(runs, 1)
              for p in run.placings]  # fmt: skip
    ends = [*(axis.x(at) for at, _ in begins[1:]), axis.x(axis.end)][: len(begins)]
    return tuple(
        Box(axis.x(at), 58.0, round(end - axis.x(at), 2), 7.0, "ab"[n % 2], name)
        for n, ((at, name), end) in enumerate(zip(begins, ends, strict=True))
    )


def _marks(job: JobAccount, axis: Axis) -> tuple[Marker, ...]:
    found = []
    for number, one in enumerate(job.incidents, 1):
        what = one.symptom.replace("_", " ")
        where = f" on {', '.join(one.suspects)}" if one.suspects else ""
        title = f"restart {number}, {clock(one.time)}: {what}{where}, cause {one.cause}"
        if job.begin <= one.time * 1000 <= job.end:
            found.append(Marker(axis.x(one.time), str(number), title))
    return tuple(found[-MOST_INCIDENTS:])


def _progress(
    runs: Sequence[JobRun], axis: Axis, marks: Sequence[Marker]
) -> tuple[Plot | None, Plot | None]:
    points = [run.points for run in runs]
    return (
        plot("Step time", "s", axis, [("time", "step time", _parts(points, "step_time_s"))], marks),
        plot("Loss", "", axis, [("loss", "loss of the first rank", _parts(points, "loss"))], marks),
    )


def _parts(runs: Sequence[Sequence[Point]], name: str) -> list[list[tuple[float, float]]]:
    """The values by time, broken at each restart."""
    parts: list[list[tuple[float, float]]] = []
    for points in runs:
        epoch: int | None = None
        for point in points:
            value = getattr(point, name)
            if value is None:
                continue
            if epoch != point.epoch:
                parts.append([])
                epoch = point.epoch
            parts[-1].append((point.time, value))
    return parts


def _ettr(job: JobAccount, axis: Axis, marks: Sequence[Marker]) -> Plot | None:
    shown = curve(job)
    if not shown.at:
        return None
    at = [t / 1000 for t in shown.at]
    series = [
        ("sliding", "last hour", [list(zip(at, shown.sliding, strict=True))]),
        ("whole", "since the start", [list(zip(at, shown.cumulative, strict=True))]),
    ]
    settled = [*shown.cumulative[len(shown.at) // 10 :], *shown.sliding[len(shown.at) // 10 :]]
    low = max(0.0, min(settled) - 0.01)
    return plot("ETTR", "", axis, series, marks, bounds=(low, 1.0))


def _anatomy(job: JobAccount) -> tuple[Anatomy, ...]:
    """Each restart as a bar of its phases, all on one scale."""
    mine: dict[int, list[Segment]] = {}
    for one in job.segments:
        if one.incident >= 0 and not one.productive:
            mine.setdefault(one.incident, []).append(one)
    numbers = sorted(mine)[-40:]
    longest = max((sum(s.ms for s in mine[n]) for n in numbers), default=0)
    if not longest:
        return ()
    right = WIDTH - RIGHT - 70  # for the label
    rows = []
    for at, number in enumerate(numbers):
        x, boxes, y = LEFT, [], 6.0 + 24.0 * at
        for one in mine[number]:
            width = one.ms / longest * (right - LEFT)
            name = PHASE_NAMES.get(one.phase, one.phase)
            title = f"{name}: {duration(one.ms / 1000)}"
            kind = KINDS.get(one.phase, "ending")
            boxes.append(Box(round(x, 2), y, round(width, 2), 16.0, kind, title))
            x += width
        spent = sum(s.ms for s in mine[number]) / 1000
        rows.append(Anatomy(number + 1, y, tuple(boxes), duration(spent), round(x, 2)))
    return tuple(rows)


def _rows(job: JobAccount, name: str) -> tuple[Row, ...]:
    rows = lost([job], SHARES[name])
    most = max((row.ms for row in rows), default=0) or 1
    return tuple(
        Row(
            PHASE_NAMES.get(row.name, row.name),
            KINDS.get(row.name, "bar"),
            duration(row.ms / 1000),
            f"{row.gpu_hours:.2f}",
            str(row.incidents or ""),
            round(100 * row.ms / most, 1),
        )
        for row in rows[:25]
    )


def as_context(of: Page) -> dict[str, Any]:
    """Return the names that the template uses."""
    return {"page": of, "width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT}
