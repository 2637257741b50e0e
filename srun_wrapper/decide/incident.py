"""One incident from first symptom to first step: its times, its record, its line for people."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from robust_slurm.text import counted, span
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.decide.ladder import LadderPlan

REJOIN = "rejoin"  # the rung of a restart in place in which some ranks kept their process
RECOVERED = "recovered"  # the only outcome after which training goes on
PHASES = ("detect", "decide", "stop", "test", "replace", "restore", "launch", "first_step")


@dataclass(slots=True)
class Incident:
    """Times are monotonic seconds; a phase runs from the mark before it to its own mark.

    ``wall`` is the wall-clock time of the detection.
    """

    id: str
    epoch: int
    diagnosis: Diagnosis
    last_good: float
    detected: float
    wall: float = field(init=False)
    plan: LadderPlan | None = None
    marks: dict[str, float] = field(default_factory=dict)
    swaps: list[tuple[str, str]] = field(default_factory=list)
    step_before: int | None = None  # newest step that was seen before the recovery
    resume_step: int | None = None  # first step that was done after it
    fresh: bool = False  # no step had been made before the failure
    began: float = 0.0  # when the epoch that failed began
    steps_seen: bool = True  # False: the program goes on, and no step of it is seen
    guessed_steps: int | None = None  # lost ones by the estimate, where they are only counted
    lost_s: float | None = None  # s of training that were lost, by the estimate
    estimate: str = ""  # what the estimate is made of, in words; "": there is none
    restored: tuple[str, ...] = ()  # what the ranks were restored from, in words
    tests: tuple[str, ...] = ()  # results of the machine tests, in words
    counters: tuple[str, ...] = ()  # error counters of nodes that have grown, in words
    ranks: int = 0  # ranks that were started again
    warm: int = 0  # of these, started with all imports done
    kept: int = 0  # of these, still in their old process
    stages: dict[str, float] = field(default_factory=dict)  # s of each stage of "stop"
    resized: tuple[int, int] | None = None  # numbers of ranks before and after, if they differ
    outcome: str = "open"

    def __post_init__(self) -> None:
        self.wall = time.time() - (time.monotonic() - self.detected)

    def mark(self, phase: str) -> None:
        """Note that a phase has ended now. Only tests and replacements may be marked again."""
        if phase in ("test", "replace") or phase not in self.marks:
            self.marks[phase] = time.monotonic()

    def started(self, ranks: int, *, warm: int, kept: int) -> None:
        """Note that the ranks of the next epoch have been started."""
        self.ranks, self.warm, self.kept = ranks, warm, kept
        if kept and self.plan is not None and self.plan.rung == "in-place":
            self.plan = replace(self.plan, rung=REJOIN)

    def phases(self) -> dict[str, float]:
        """Seconds per phase; a phase that did not happen took 0."""
        out = {"detect": max(0.0, self.detected - self.last_good)}
        previous = self.detected
        for phase in PHASES[1:]:
            if phase == "first_step" and not self.steps_seen:
                continue
            at = self.marks.get(phase, previous)
            out[phase] = max(0.0, at - previous)
            previous = max(previous, at)
        out["total"] = previous - self.last_good
        return {name: round(seconds, 4) for name, seconds in out.items()}

    @property
    def lost_steps(self) -> int | None:
        """Number of steps that had to be done again; None: not known, which is not 0."""
        if self.fresh:
            return 0
        if self.step_before is None or self.resume_step is None:
            return self.guessed_steps
        return max(0, self.step_before - self.resume_step + 1)

    def record(self, job: int, step_id: str) -> dict[str, Any]:
        """The line of incidents.jsonl."""
        return {
            "id": self.id,
            "job": job,
            "step_id": step_id,
            "epoch": self.epoch,
            "time": self.wall,
            "symptom": self.diagnosis.symptom,
            "cause": self.diagnosis.cause,
            "suspects": list(self.diagnosis.suspects),
            "evidence": list(self.diagnosis.evidence),
            "rule": self.diagnosis.rule,
            "action": self.plan.action if self.plan else "none",
            "why": self.plan.why if self.plan else "",
            "rung": self.plan.rung if self.plan else "",
            "swaps": [list(pair) for pair in self.swaps],
            "resized": list(self.resized) if self.resized else [],
            "outcome": self.outcome,
            "phases": self.phases(),
            "stop_stages": self.stages,
            "steps_seen": self.steps_seen,
            "lost_steps": self.lost_steps,
            "lost_s": None if self.lost_s is None else round(self.lost_s, 3),
            "estimate": self.estimate,
            "restored": list(self.restored),
            "tests": list(self.tests),
            "counters": list(self.counters),
            "ranks": self.ranks,
            "warm": self.warm,
            "kept": self.kept,
        }

    def line(self) -> str:
        """One plain line for stderr."""
        phases = self.phases()
        left_out = {"restore": not self.restored, "test": not self.tests}
        shown = [name for name in PHASES if not left_out.get(name)]
        parts = ", ".join(
            f"{name} {phases[name]:.2f}" if name in phases else "first step not seen"
            for name in shown
        )
        what = self.diagnosis.symptom.replace("_", " ")
        where = ",".join(self.diagnosis.suspects) or self.diagnosis.root.node or "the job"
        swapped = "".join(f"; {new} took the ranks of {old}" for old, new in self.swaps)
        head = f"recovered from {what} on {where}"
        if self.diagnosis.symptom == "update":
            head = f"{self.diagnosis.evidence[0]}: ranks restarted"
        if self.diagnosis.symptom == "grow":
            head = self.diagnosis.evidence[0]
        if self.resized:
            swapped += "; resized {}→{}".format(*self.resized)
        warm = f"; {self.warm} of {self.ranks} ranks started warm" if self.warm else ""
        if self.kept:
            new = f", {self.warm} started warm" if self.warm else ""
            warm = f"; {self.kept} of {self.ranks} ranks kept their process{new}"
        restored = f"; {self.restored[0].partition(':')[0]}" if self.restored else ""
        return (
            f"{head} in {phases['total']:.2f} s ({parts}){warm}{restored}{swapped}; {self.cost()}"
        )

    def cost(self) -> str:
        """Words for what was lost."""
        lost = self.lost_steps
        if self.estimate:
            what = span(self.lost_s or 0.0) if lost is None else counted(lost, "step")
            return f"about {what} lost (estimate: {self.estimate})"
        if lost is not None:
            return f"{counted(lost, 'step')} lost"
        what = "steps" if self.steps_seen else "time"
        return f"lost {what} unknown: no checkpoint file of the program was found"


def ordered(symptom: Symptom, line: str, why: str, number: str, epoch: int) -> Incident:
    """Open the incident of a restart without a failure: it blames nobody."""
    now = time.monotonic()
    root = Failure(symptom, now, now, "")
    diagnosis = Diagnosis(symptom, "ordered", (), (line,), symptom, root, rule=symptom)
    plan = LadderPlan("restart", (), why, rung=symptom)
    return Incident(number, epoch, diagnosis, now, now, plan=plan)


def ettr(elapsed: float, unproductive: float) -> float | None:
    """Effective training time ratio: productive seconds / elapsed seconds (ByteRobust 2.1)."""
    if elapsed <= 0:
        return None
    return max(0.0, min(1.0, 1.0 - unproductive / elapsed))
