"""`make demo`: a training on a real Slurm loses a node and goes on (root; 3 minutes on 2 cores).

The node dies long after the start, when all ranks would start warm.

Exit codes: 0 the training recovered from memory, lost no more than one step, and its losses equal
those of the uninterrupted run; 1 not; 130 interrupted. What the two runs wrote is in demo-out/.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab import curves
from lab.cluster import Cluster, Lab
from lab.errors import LabError
from lab.host import REPOSITORY, check_host
from lab.slurm.newest import newest
from lab.spec import HEAD

OUT = REPOSITORY / "demo-out"
STEPS, SAVE_EVERY = 240, 10
STEP_TIME = 0.2  # s; a step alone takes half of it of the two cores that all nodes share here
PLAN = "speeches:plan"  # of robust_slurm.data
CRASH_FROM, CRASH_BY = 47, 200  # at the first of these steps at which all ranks would start warm
VICTIM = "n3"
START_S = 240.0  # submission -> first step: eight interpreters import torch on what cores there are
RUN_S = 400.0  # first step -> end
RANKS = 8
REQUEUE_S = 120.0  # Slurm's delay before a requeued job may start again
REPORT = "report.html"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"}
PHASES = ("detect", "decide", "stop", "replace", "restore", "launch", "first_step", "total")

Points = dict[int, curves.Point]


class DemoError(Exception):
    """The demonstration did not show what it should; the message says what happened instead."""


class Story:
    """One line per event, with the seconds since the beginning."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def say(self, who: str, text: str, style: str = "") -> None:
        clock = f"{time.monotonic() - self._began:6.1f} s"
        body = f"[{style}]{escape(text)}[/]" if style else escape(text)
        self.console.print(f"[dim]{clock}[/]  [bold]{who:<6}[/] {body}")


class Run:
    """One training job: submitted, followed by its loss file and its output."""

    def __init__(self, lab: Lab, story: Story, who: str, script: str, name: str) -> None:
        self.lab, self.story, self.who = lab, story, who
        self.output = lab.shared / f"{name}.out"
        self.losses = lab.shared / name / "loss.jsonl"
        self._shown_step = 0
        self._shown_lines = 0
        argv = ["sbatch", "--parsable", f"--chdir={REPOSITORY}", f"--output={self.output}"]
        argv += [f"examples/{script}", "--out", str(self.losses.parent)]
        argv += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--plan", PLAN]
        argv += ["--step-time", str(STEP_TIME)]
        # The nodes of a lab have no name service, and torch warns about that in every rank.
        env = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = lab.exec(HEAD, argv, cwd=REPOSITORY, env=env, check=True)
        self.job = int(done.stdout.strip().split(";")[0])
        story.say(who, f"sbatch examples/{script} is job {self.job}: 4 nodes, 8 ranks, torch DDP")
        by = "every rank itself" if who == "srun" else "the data process of its node"
        story.say(who, f"plan {PLAN}: the batches of a rank are prepared by {by}")

    def points(self) -> Points:
        try:
            return curves.parse(self.losses.read_text())
        except FileNotFoundError:
            return {}

    def until(self, what: str, reached: Callable[[Points], bool], s: float) -> None:
        """Show the run's progress until `reached(points)`; DemoError when it ends before."""
        deadline = time.monotonic() + s
        while True:
            state = self.lab.job(self.job)["JobState"]  # first: files of an ended job are complete
            points = self.points()
            self._show(points)
            if reached(points):
                return
            if state in ENDED:
                raise DemoError(f"job {self.job} is {state} before {what}{self._tail()}")
            if time.monotonic() > deadline:
                raise DemoError(f"job {self.job} is {state}; not {what} in {s:.0f} s{self._tail()}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait for the job's end and show the rest; DemoError unless it completed all steps."""
        self.until(f"step {STEPS}", lambda points: STEPS in points, RUN_S)
        record = self.lab.wait_job(self.job, ENDED, 60)
        self._show(self.points())
        if record["JobState"] != "COMPLETED":
            raise DemoError(f"job {self.job} ended as {record['JobState']}{self._tail()}")
        self.story.say(self.who, f"job {self.job} is COMPLETED")

    def _show(self, points: Points) -> None:
        for line in self._new_lines():
            if line.startswith(("robust-srun: ", "robust-slurm: data: ")):
                self.story.say(self.who, line, "yellow")
            elif line.startswith(("starting", "resumed")):
                self.story.say(self.who, f"rank 0: {line}")
        newest = max(points, default=0)
        if newest < self._shown_step:  # steps are done again
            self._shown_step = newest - newest % 10
        for step in range(self._shown_step + 1, newest + 1):
            if step == 1 or step % 20 == 0:
                self.story.say(self.who, f"step {step:>3}  loss {points[step].loss:.4f}", "green")
        self._shown_step = newest

    def _new_lines(self) -> list[str]:
        try:
            text = self.output.read_text(errors="replace")
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()
        new, self._shown_lines = lines[self._shown_lines :], len(lines)
        return new

    def _tail(self) -> str:
        try:
            lines = self.output.read_text(errors="replace").splitlines()[-25:]
        except OSError as error:
            return f"; no output: {error}"
        return "; the end of its output:\n  " + "\n  ".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.demo")
    words = "as for a lab (default: the newest that can be had soon)"
    parser.add_argument("--slurm", default="", metavar="RELEASE", help=words)
    args = parser.parse_args(argv)
    story = Story()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        check_host()
        same = _demo(story, args.slurm or newest(lambda line: story.say("lab", line)))
    except (DemoError, LabError) as error:
        story.console.print(f"demo: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        story.console.print("\ndemo: interrupted; the lab is gone")
        return 130
    return 0 if same else 1


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # leaves the lab's `with` block


def _demo(story: Story, release: str) -> bool:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    story.console.rule("robust-slurm: a node dies under a running training")
    with Cluster(f"demo-{os.getpid()}", nodes=4, standby=1, slurm=release) as lab:
        timeout = _slurmd_timeout(lab)
        nodes = " ".join(lab.spec.train_names)
        story.say(
            "lab", f"a real Slurm {lab.spec.slurm} is up: {nodes} in partition train, s1 in standby"
        )
        try:
            same = _runs(lab, story, timeout)
        finally:
            _collect(lab)
    story.say("lab", "taken down, nothing of it is left")
    report = (OUT / REPORT).relative_to(REPOSITORY)
    story.console.print(f"The job's report, to open in a browser: {report}", style="bold")
    return same


def _runs(lab: Lab, story: Story, timeout: float) -> bool:
    before = Run(lab, story, "srun", "job-before.sbatch", "before")
    before.until("the first step", bool, START_S)
    before.finish()

    after = Run(lab, story, "robust", "job-after.sbatch", "after")
    after.until("the first step", bool, START_S)
    after.until(
        f"step {CRASH_FROM} and warm ranks",
        lambda points: CRASH_FROM in points and (_warm(after) >= RANKS or CRASH_BY in points),
        RUN_S,
    )
    crashed = lab.crash(VICTIM)
    last = max(after.points())
    story.say("fault", f"node {VICTIM} dies: link down, everything on it gone", "bold red")
    first = min(after.points().values(), key=lambda point: point.time).epoch
    after.until(
        "the first step after the crash",
        lambda points: any(point.epoch > first for point in points.values()),
        START_S,
    )
    again = min(p.time for p in after.points().values() if p.epoch > first) - crashed
    story.say("robust", f"training again {again:.1f} s after the crash", "bold green")
    after.until("the steps after it", lambda points: max(points, default=0) > last + 3, RUN_S)
    record = lab.node_records()[VICTIM]
    story.say("slurm", f"{VICTIM} is {record['State']}: DOWN only after {timeout:.0f} s of silence")
    _status(lab, story, after.job)
    after.finish()
    incident = _incident(lab, after.job)
    points = after.points()
    resumed = min(step for step, point in points.items() if point.epoch > first) - 1
    _tell(story, incident, again, timeout, last - resumed)
    same = _compare(story, before.points(), points, last)
    _report(lab, story, after.job)
    if incident["lost_steps"] > 1 or last - resumed > 1 or not _from_memory(incident):
        raise DemoError(f"resumed after step {resumed} of {last}, where memory had all but one")
    return same


def _job_dir(lab: Lab, job: int) -> Path:
    """Return the directory of robust-srun's records of a job."""
    return lab.shared / ".robust-slurm" / "jobs" / str(job)


def _warm(run: Run) -> int:
    """Return the number of ranks that would start warm now."""
    found = _job_dir(run.lab, run.job).glob("roster.*.json")
    rosters = [json.loads(path.read_text()) for path in found]
    return sum(node["warm"] for roster in rosters for node in roster["nodes"])


def _slurmd_timeout(lab: Lab) -> float:
    config = lab.exec(HEAD, ["scontrol", "show", "config"], check=True).stdout
    line = next(line for line in config.splitlines() if line.startswith("SlurmdTimeout"))
    return float(line.split("=")[1].split()[0])


def _status(lab: Lab, story: Story, *words: object, shown: bool = True) -> None:
    argv = ["robust-status", *map(str, words)]
    width = {"COLUMNS": str(story.console.width)}
    done = lab.exec(HEAD, argv, env=width, timeout=30)
    if shown:
        story.console.print(f"\n$ {' '.join(argv)}", style="bold")
        story.console.print(done.stdout, markup=False)
    if done.returncode != 0:
        raise DemoError(f"robust-status: exit code {done.returncode}: {done.stderr.strip()}")


def _report(lab: Lab, story: Story, job: int) -> None:
    """Show why the job was restarted, and write its page."""
    _status(lab, story, job, "--why")
    _status(lab, story, job, "--html", lab.shared / REPORT, shown=False)


def _incident(lab: Lab, job: int) -> dict[str, Any]:
    path = _job_dir(lab, job) / "incidents.jsonl"
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise DemoError(f"there is no {path}: robust-srun saw no incident") from None
    if len(lines) != 1:
        raise DemoError(f"{len(lines)} incidents in {path}; one node was crashed, once")
    incident: dict[str, Any] = json.loads(lines[0])
    return incident


def _from_memory(incident: dict[str, Any]) -> bool:
    return any("from memory" in line for line in incident["restored"][:1])


def _tell(
    story: Story, incident: dict[str, Any], again: float, timeout: float, redone: int
) -> None:
    table = Table(title="the incident in seconds, from incidents.jsonl", title_justify="left")
    for name in PHASES:
        table.add_column(name, justify="right")
    table.add_row(*(f"{incident['phases'][name]:.2f}" for name in PHASES))
    swaps = ", ".join(f"{new} for {old}" for old, new in incident["swaps"])
    story.console.print(table)
    story.console.print(
        f"symptom {incident['symptom']}, cause {incident['cause']}, action {incident['action']} "
        f"({swaps}), steps done again: {redone}.\n"
        f"{incident['restored'][0]}.\n"
        f"{incident['warm']} of {incident['ranks']} ranks started warm; the others import torch "
        f"first, on {len(os.sched_getaffinity(0))} cores: that is most of first_step.\n"
        f"Plain Slurm: {timeout:.0f} s (SlurmdTimeout) until it takes the node for dead, about "
        f"{REQUEUE_S:.0f} s until the requeued job may start, then the same start-up: over "
        f"{timeout + REQUEUE_S:.0f} s instead of {again:.1f} s, and the steps since the newest "
        "checkpoint on disk again.\n",
        markup=False,
    )


def _compare(story: Story, one: Points, other: Points, crash: int) -> bool:
    table = Table(title="loss of all 8 ranks", title_justify="left")
    table.add_column("step", justify="right")
    for name in ("uninterrupted (srun)", f"{VICTIM} lost (robust-srun)", "difference"):
        table.add_column(name, justify="right")
    table.add_column("done by")
    for step in curves.choose(other.keys() & one.keys(), range(crash - 1, crash + 3)):
        a, b = one[step].loss, other[step].loss
        table.add_row(
            str(step), f"{a:.9f}", f"{b:.9f}", f"{a - b:.1g}" if a != b else "0.0",
            f"epoch {other[step].epoch}",
        )  # fmt: skip
    story.console.print(table)
    steps = sorted(one.keys() & other.keys())
    shown = curves.columns(steps, 60)
    low, high = min(p.loss for p in one.values()), max(p.loss for p in one.values())
    for name, run in (("uninterrupted", one), (f"{VICTIM} lost", other)):
        bars = curves.chart([run[step].loss for step in shown], low, high)
        story.console.print(f"{name:>14}  {bars}", markup=False)
    at = sum(step < crash for step in shown)
    story.console.print(f"{'':>14}  {'':>{at}}^ {VICTIM} dies at step {crash}", markup=False)
    gap = curves.difference(one, other)
    verdict = "the two curves are equal" if gap == 0 else "THE CURVES DIFFER"
    story.console.print(
        f"\n{len(steps)} steps, max difference {gap}: {verdict}. Both runs' files are in "
        f"{OUT.relative_to(REPOSITORY)}/.",
        style="bold green" if gap == 0 else "bold red",
    )
    if gap == 0:
        story.console.print("So all ranks had the same batches, with and without the crash.")
    return gap == 0


def _collect(lab: Lab) -> None:
    """Copy what the runs wrote; the lab's shared directory goes away with the lab."""
    for path in lab.shared.glob("*.out"):
        shutil.copyfile(path, OUT / path.name)
    for path in lab.shared.glob(REPORT):
        shutil.copyfile(path, OUT / path.name)
    for path in lab.shared.glob("*/loss.jsonl"):
        shutil.copyfile(path, OUT / f"{path.parent.name}-loss.jsonl")
    for path in lab.shared.glob(".robust-slurm/jobs/*/*.json*"):
        shutil.copyfile(path, OUT / path.name)


if __name__ == "__main__":
    raise SystemExit(main())
