"""The time from a request for new code to its first step: ``python -m bench.update`` (root).

Ways to run new code, in turn in one lab, each with all ranks on one node: ``robust-update`` on a
job of robust-srun (``python train.py``, ``python -m train``); ``scancel`` and ``sbatch`` of the
same training under plain srun; ``scontrol requeue`` of it. ``--torch``: a real training over gloo,
which imports torch. docs/bench.md says how to read the numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.common import MIN_SAMPLES, BenchError, Results, finish, parser, results_for, summarise
from bench.training.job import MODULE, Training
from lab import Cluster, Lab

RANKS = {"toy": 8, "torch": 2}  # by workload; a rank of torch keeps a core busy
EVERY = {"toy": 1, "torch": 4}  # turns until Slurm's own ways, which start torch anew, come again
STEP_TIME = 0.1  # s of sleep in each step
QUICK = 2
UPDATES = {"update": "train.py", "update_module": "-m train"}  # what python is given
SLURM = ("requeue", "resubmit")
NODES = 6  # two for the jobs that are updated; jobs that wait after a requeue hold none
SETTLED = 2.0  # s after all ranks would start warm: what an update leaves to do is done
FIRST_STEP = 400.0  # s at most, of a job that need not wait
REQUEUE = 600.0  # s at most; Slurm waits about 120 s before it starts a requeued job
SCRIPT = """\
import os, pathlib
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
pathlib.Path({directory!r}, "ran." + rank).write_text({version!r})
from {module} import main
main()
"""
ROBUST = "exec robust-srun --robust-code=."
PLAIN = "export MASTER_ADDR=$(hostname) MASTER_PORT=29500; exec srun --overcommit"


@dataclass
class Job:
    """A training that runs ``train.py`` of a directory of its own, and the code's version there."""

    training: Training
    launch: str
    program: str = "train.py"  # after python
    version: int = 0
    requested: float = field(default=0.0)  # wall time

    @classmethod
    def started(cls, lab: Lab, workload: str, launch: str, program: str = "train.py") -> Job:
        """Start a job, and wait until it makes steps."""
        job = cls(Training.new(lab, workload, RANKS[workload]), launch, program)
        (job.training.directory / "proj").mkdir()
        job.edit()
        job.submit()
        job.training.wait_stepping()
        return job

    def edit(self) -> None:
        """Write the next version of the code."""
        self.version += 1
        place, module = str(self.training.directory), MODULE[self.training.workload]
        text = SCRIPT.format(directory=place, version=str(self.version), module=module)
        (self.training.directory / "proj" / "train.py").write_text(text)

    def submit(self) -> None:
        training = self.training
        lines = ["#!/bin/bash", *(f"export {k}={v}" for k, v in training.env().items())]
        options = f"--dir {training.directory} --step-time {STEP_TIME}"
        lines += [
            f"cd {training.directory}/proj",
            f"{self.launch} python {self.program} {options}",
            "",
        ]
        output = ["-o", str(training.directory / "output"), "--open-mode=append"]
        ranks = f"--ntasks-per-node={training.world}"
        size = ["-N1", "--exclusive", ranks, "--overcommit"]
        args = [*output, *size, "--no-kill", "--requeue"]
        training.job = training.lab.sbatch("\n".join(lines), args)

    def stepped(self) -> bool:
        """True if all ranks have made a step since the request."""
        return len(self.training.first_steps(self.requested)) == self.training.world

    def took(self, timeout: float = FIRST_STEP) -> float:
        """Wait for that; seconds from the request to the last rank's. BenchError for old code."""
        training = self.training
        training.wait(self.stepped, f"no step of version {self.version}", timeout)
        notes = (training.directory / f"ran.{rank}" for rank in range(training.world))
        ran = {note.read_text() for note in notes}
        if ran != {str(self.version)}:
            raise BenchError(f"{training.directory}: versions {ran} ran, not {self.version}")
        return max(training.first_steps(self.requested).values()) - self.requested


@dataclass
class Turns:
    """All ways, in turn."""

    lab: Lab
    workload: str
    runs: int
    found: dict[str, list[float]] = field(default_factory=dict)
    waiting: list[Job] = field(default_factory=list)  # requeued jobs

    def run(self) -> None:
        jobs = {
            way: Job.started(self.lab, self.workload, ROBUST, program)
            for way, program in UPDATES.items()
        }
        for turn in range(self.runs):
            if turn % EVERY[self.workload] == 0:
                self._resubmit_and_requeue()
            for way, job in jobs.items():
                self._update(way, job)
            self._collect([j for j in self.waiting if j.stepped()])
        for job in jobs.values():
            job.training.cancel()
        self._collect(list(self.waiting))

    def _note(self, way: str, seconds: float) -> None:
        samples = self.found.setdefault(way, [])
        samples.append(seconds)
        print(f"{way} {len(samples)}: {seconds:.2f} s", flush=True)

    def _update(self, way: str, job: Job) -> None:
        job.training.wait_warm(job.training.world)
        time.sleep(SETTLED)
        job.edit()
        job.requested = time.time()
        argv = ["robust-update", str(job.training.job), "--now", "--why=bench"]
        env = {"ROBUST_STATE_DIR": str(job.training.directory / "state")}
        done = self.lab.exec("head", argv, env=env, timeout=FIRST_STEP)
        if done.returncode:
            raise BenchError(f"{job.training.directory}: {done.stderr}")
        self._note(way, job.took())

    def _resubmit_and_requeue(self) -> None:
        job = Job.started(self.lab, self.workload, PLAIN)
        job.edit()
        job.requested = time.time()
        job.training.scancel()
        job.submit()
        self._note("resubmit", job.took())
        job.training.wait_stepping()
        job.edit()
        job.requested = time.time()
        self.lab.exec("head", ["scontrol", "requeue", str(job.training.job)], check=True)
        self.waiting.append(job)

    def _collect(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._note("requeue", job.took(REQUEUE))
            job.training.cancel()
            self.waiting.remove(job)


def measure(results: Results, workload: str) -> None:
    """Measure all ways: ``<way>.total_s``, and ratios to both kinds of update."""
    runs = results.runs or (QUICK if results.quick else MIN_SAMPLES)
    with Cluster(nodes=NODES, standby=0) as lab:
        turns = Turns(lab, workload, runs)
        turns.run()
    for way, samples in turns.found.items():
        if way in UPDATES:
            results.add(f"{way}.total_s", samples, "s")
        else:  # fewer: see EVERY
            results.metrics[f"{way}.total_s"] = summarise(samples, "s")
    for slower, faster in itertools.product(SLURM, UPDATES):
        results.ratio(f"{slower}/{faster}", f"{slower}.total_s", f"{faster}.total_s")
    results.settings |= {
        "workload": workload,
        "ranks": f"1x{RANKS[workload]}",
        "step_time_s": STEP_TIME,
    }


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("update", ["toy", "torch"])
    made.add_argument("--torch", action="store_true", help="run only the case torch")
    args = made.parse_args(argv)
    cases = ["torch"] if args.torch else args.case or ["toy"]
    if len(cases) > 1:
        made.error("the metrics of the cases have the same names: run one case")
    results = results_for("update", args)
    measure(results, cases[0])
    return finish(results, args)


if __name__ == "__main__":
    raise SystemExit(main())
