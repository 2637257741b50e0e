"""The cost of robust-srun when nothing fails: ``python -m bench.overhead`` (root).

The same commands under srun and robust-srun, in turn, inside one job on a lab: case ``start``
times ``hostname``; cases ``toy`` and ``torch`` compare the step times of the same training; case
``early`` compares them in each second after the first step, while robust-srun imports ahead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.common import MIN_SAMPLES, REPOSITORY, BenchError, Results, main, summarise
from bench.overhead.driver import LAUNCHERS
from bench.training.job import read_lines
from lab import Cluster

NODES = 2
LIMIT = 2400.0
QUICK_RUNS = 2
STEPS = {"toy": (400, 0.004), "torch": (400, 0.0)}  # steps per run, s of sleep in each
QUICK_STEPS = 100
EARLY_STEPS = 1000  # 7 to 9 s of the torch workload
EARLY = 6  # seconds of a training that are compared
Samples = dict[tuple[str, str], list[float]]
"""Seconds by (what, launcher), in the order of the runs."""


def start(results: Results) -> None:
    """Seconds from exec to the first line and to the exit of ``hostname``: 4 tasks, 2 nodes."""
    runs = _runs(results)
    found = _in_job(["--start-runs", str(runs)], 2)
    for what in ("hostname", "first_line"):
        _add(results, what, found, what)


def toy(results: Results) -> None:
    """Step time of the workload without torch."""
    _steps(results, "toy")


def torch(results: Results) -> None:
    """Step time of a DDP training."""
    _steps(results, "torch")


def early(results: Results) -> None:
    """Mean step time of a DDP training in each of its first seconds, and when it is warm."""
    options = ["--step-runs", str(_runs(results)), "--workload", "torch", "--early"]
    found = _in_job([*options, "--steps", str(EARLY_STEPS)], 1)
    for second in range(1, EARLY + 1):
        _add(results, f"early.second_{second}", found, f"second_{second}")
    for what in ("step", "first_step"):
        _add(results, f"early.{what}", found, what)
    ready = found.get(("ready", LAUNCHERS[1]), [])
    # The interpreters get what the ranks leave of two busy cores: most runs end before.
    results.count("early.ready_runs", len(ready))
    if ready:
        results.metrics["early.ready_s"] = summarise(ready, "s")


def _steps(results: Results, workload: str) -> None:
    steps, step_time = STEPS[workload]
    options = ["--step-runs", str(_runs(results)), "--workload", workload]
    options += ["--steps", str(QUICK_STEPS if results.quick else steps)]
    found = _in_job([*options, "--step-time", str(step_time)], 1)
    suffix = "" if workload == "torch" else f"_{workload}"
    for what in ("step", "first_step"):
        _add(results, f"{what}{suffix}", found, what)


def _add(results: Results, name: str, found: Samples, what: str) -> None:
    bare, robust = (found.get((what, launcher), []) for launcher in LAUNCHERS)
    if len(bare) != _runs(results) or len(robust) != len(bare):
        raise BenchError(f"{what}: {len(bare)} runs with srun and {len(robust)} with robust-srun")
    results.add(f"{name}.srun_s", bare, "s")
    results.add(f"{name}.robust_srun_s", robust, "s")
    # Neighbours in time, so that a slow minute of the machine is in both.
    pairs = list(zip(robust, bare, strict=True))
    results.add(f"{name}.paired_ratio", [r / b for r, b in pairs], "ratio")
    results.add(f"{name}.extra_s", [r - b for r, b in pairs], "s")
    results.ratio(f"{name}: robust-srun/srun", f"{name}.robust_srun_s", f"{name}.srun_s")


def _runs(results: Results) -> int:
    return results.runs or (QUICK_RUNS if results.quick else MIN_SAMPLES)


def _in_job(options: list[str], per_node: int) -> Samples:
    """Run the driver as a batch job; its samples by (what, launcher)."""
    with Cluster(nodes=NODES, standby=0) as lab:
        directory = lab.shared / "bench-overhead"
        directory.mkdir()
        os.chown(directory, lab.uid, lab.uid)
        out, output = directory / "out.jsonl", directory / "output"
        script = f"""#!/bin/bash
export PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1 ROBUST_STATE_DIR={directory}/state
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
exec python -m bench.overhead.driver --out {out} {" ".join(options)}
"""
        size = [f"-N{NODES}", f"--ntasks-per-node={per_node}", "--no-kill"]
        job = lab.sbatch(script, [*size, "-o", str(output), "-D", str(directory)])
        state = lab.wait_job(job, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}, LIMIT)
        notes = read_lines(out)
        if state["JobState"] != "COMPLETED" or not notes or notes[-1]["what"] != "done":
            raise BenchError(f"the job {state['JobState']}:\n{_tail(output)}")
    return _sorted(notes)


def _sorted(notes: list[dict[str, Any]]) -> Samples:
    found: Samples = {}
    for note in notes:
        if "value" in note:
            found.setdefault((note["what"], note["launcher"]), []).append(float(note["value"]))
    return found


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-2000:] if output.exists() else "no output"


CASES = {"start": start, "toy": toy, "torch": torch, "early": early}

if __name__ == "__main__":
    raise SystemExit(main("overhead", CASES))
