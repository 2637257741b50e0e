"""A job's ``progress.jsonl``, read without trust: runs, their worlds, first steps and progress.

robust-srun writes it (``srun_wrapper/job/reporting/chronicle.py``); the file belongs to the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm.state_dir.files import RecordBudget, content
from robust_slurm.state_dir.records import clean, decode, moment, number, whole

NAME = "progress.jsonl"
BYTES = 2 << 20  # the newest end of the file is read; 90 days of one run are about 400 KB
MOST_PLACES = 20_000  # of all worlds of a run
MOST_RUNS = 200  # the newest
MOST_POINTS = 8000  # of a run
MOST_RANKS = 1_000_000  # and GPUs: sums over all jobs have them as a factor


@dataclass(frozen=True)
class Point:
    """The training at one moment. Times are seconds since 1970."""

    time: float
    step: int | None
    step_time_s: float | None
    loss: float | None
    epoch: int


@dataclass(frozen=True)
class Placing:
    """The places that changed with a new epoch's world: place → node and its ranks, as text."""

    time: float
    epoch: int
    places: Mapping[int, tuple[str, str]]


@dataclass
class JobRun:
    """One robust-srun of the job, from its start to the last line that it wrote."""

    started: float
    step_id: str = ""
    partition: str = ""
    ranks: int = 0
    gpus: int = 0  # 0: not known
    first_step: float | None = None
    ended: float | None = None
    state: str = ""  # at its end; "" while it runs
    points: list[Point] = field(default_factory=list)
    placings: list[Placing] = field(default_factory=list)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """Since when the job has trained with so many ranks of how many; the first one is not here."""
    launched: float | None = None  # when all ranks had been started for the first time


def read_progress(
    job_dir: Path | None, budget: RecordBudget | None = None
) -> tuple[list[JobRun], list[str]]:
    """Return the runs of a job, oldest first, and what could not be read."""
    if job_dir is None:
        return [], []
    problems: list[str] = []
    # A job of an older robust-srun has none.
    raw = content(job_dir / NAME, BYTES, problems, tail=True, budget=budget)
    return progress_from(raw or b""), problems


def progress_from(raw: bytes) -> list[JobRun]:
    """The runs in a file's text. Pure. Steps of a job that run side by side are kept apart."""
    runs: list[JobRun] = []
    open_: dict[str, JobRun] = {}
    for line in raw.split(b"\n"):
        data = decode(line) if line.strip() else None
        if not isinstance(data, dict) or (when := moment(data.get("time"))) is None:
            continue
        step = clean(data.get("step_id"), 40)
        if data.get("kind") == "run":
            open_[step] = JobRun(
                when,
                step,
                clean(data.get("partition"), 64),
                _count(data.get("ranks")),
                _count(data.get("gpus")),
            )
            runs.append(open_[step])
        elif step in open_:
            _add(open_[step], when, data)
    return sorted(runs[-MOST_RUNS:], key=lambda run: run.started)


def _add(run: JobRun, when: float, data: dict[str, object]) -> None:
    epoch = whole(data.get("epoch")) or 0
    match data.get("kind"):
        case "launched":
            run.launched = when
        case "first":
            run.first_step = when
        case "point" if len(run.points) < MOST_POINTS:
            s, loss = number(data.get("s")), number(data.get("loss"))
            run.points.append(Point(when, whole(data.get("step")), s, loss, epoch))
        case "world":
            room = MOST_PLACES - sum(len(placing.places) for placing in run.placings)
            if len(run.placings) < MOST_POINTS and room > 0:
                run.placings.append(Placing(when, epoch, _places(data.get("places"), room)))
            run.ranks = max(run.ranks, _count(data.get("ranks")))
            now, of = _count(data.get("trains")), _count(data.get("of"))
            if len(run.sizes) < MOST_POINTS and (0 < now < of or run.sizes):
                run.sizes.append((when, now, of) if 0 < now < of else (when, 1, 1))
        case "end":
            run.ended, run.state = when, clean(data.get("state"), 20)


def _count(value: object) -> int:
    return min(MOST_RANKS, max(0, whole(value) or 0))


def _places(value: object, most: int) -> dict[int, tuple[str, str]]:
    found = {}
    for key, text in list(value.items())[:most] if isinstance(value, dict) else ():
        node, _, ranks = clean(text, 300).partition(" ")
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 7 and node:
            found[int(key)] = (node, ranks)
    return found
