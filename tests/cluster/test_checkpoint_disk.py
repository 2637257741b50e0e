"""Where memory cannot help: no room in it, the job's end, other launchers, another world size."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ckpt_jobs import WAIT, Curve, job, read_lines, run_here, undisturbed
from conftest import LabFactory

from lab import Cluster
from robust_slurm.checkpoint import durable

pytest.importorskip("torch")
pytest.importorskip("torchdata")

PROGRAM = "ckpt_ddp.py"
STEPS = 14
ROBUST_CKPT = [sys.executable, "-m", "robust_slurm.checkpoint.cli"]
WORLD = 2
BALLAST = "--ballast=1000000"  # bytes; a snapshot is three times that


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Curve]:
    return undisturbed(PROGRAM, tmp_path_factory.mktemp("durable"), WORLD, STEPS, BALLAST)


@pytest.mark.timeout(300)
def test_memory_full(new_lab: LabFactory, expected: Sequence[Curve]) -> None:
    """It is said, training goes on, and the checkpoints on disk serve."""
    lab = new_lab(nodes=2, standby=0)
    lab.fill("n2", "/dev/shm", leave=2 << 20)
    training = job(lab, PROGRAM, WORLD, STEPS)
    options = f"{BALLAST} --every=3 --hold=1:6"
    training.start("", options, sbatch=["-N2", "--ntasks-per-node=1"])
    training.wait_held(1, 6)
    training.until(lambda: durable.newest(training.directory), "checkpoint on disk")
    training.kill(PROGRAM, rank=0)
    training.check_ended(expected)
    assert training.resumed() == [0, 3], training.story()
    full, *_ = [text for text in training.said_alarms() if "no snapshots in memory" in text]
    assert "/dev/shm" in full and "are needed" in full and "are free" in full
    assert training.says(f"^robust-srun: checkpoints, rank 1 on n2: {re.escape(full)}$")
    assert durable.newest(training.directory).step == STEPS


@pytest.mark.timeout(300)
def test_rank_and_its_replica_lost_at_once(new_lab: LabFactory, expected: Sequence[Curve]) -> None:
    """Nothing is left in memory: the newest checkpoint on disk serves, and that is said."""
    lab = new_lab(nodes=3, standby=2)
    training = job(lab, PROGRAM, WORLD, STEPS)
    robust = "-N2 -n2 --relative=1"  # the batch host n1 has no rank
    training.start(robust, f"{BALLAST} --every=4 --hold=1:7", sbatch=["-N3"])
    training.wait_held(1, 7)
    training.until(lambda: durable.newest(training.directory), "checkpoint on disk")
    lab.crash("n2")
    lab.crash("n3")
    training.check_ended(expected)
    assert training.resumed() == [0, 4], training.story()
    record = training.only_incident(symptom="node_lost", action="swap_companion", lost_steps=2)
    assert {old for old, _ in record["swaps"]} == {"n2", "n3"}
    assert training.events("restore")[-1]["tier"] == "shared"
    assert re.search("step 4 .*disk", record["restored"][0]), record


@pytest.mark.timeout(300)
def test_directory_that_cannot_be_written(lab: Cluster, expected: Sequence[Curve]) -> None:
    training = job(lab, PROGRAM, WORLD, STEPS)
    training.directory.mkdir(mode=0o555)  # root's: the user may not write
    options = f"{BALLAST} --every=4 --kill=1:10:1"
    training.start("", options, sbatch=["-N1", "--ntasks-per-node=2"])
    training.check_ended(expected)
    assert training.resumed() == [0, 9], training.story()
    training.check_lost(1)
    assert any(str(training.directory) in text for text in training.said_alarms())


@pytest.mark.timeout(300)
def test_cancelled_job_goes_on_elsewhere(
    new_lab: LabFactory, expected: Sequence[Curve], tmp_path: Path
) -> None:
    """A cancelled job writes its newest step; plain srun takes it up, and then plain python."""
    lab = new_lab(nodes=2, standby=0, KillWait=30)  # Slurm's default
    training = job(lab, PROGRAM, WORLD, STEPS)
    training.start("", f"{BALLAST} --hold=1:9", sbatch=["-N2", "--ntasks-per-node=1"])
    training.wait_held(1, 9)
    lab.exec("head", ["scancel", str(training.job)], check=True)
    training.wait_end(WAIT)
    training.check_gone()
    newest = durable.newest(training.directory)
    assert newest is not None and newest.step == 8, training.story()
    checked = lab.exec("head", [*ROBUST_CKPT, "verify", str(newest.path)])
    assert checked.returncode == 0, checked

    words = training.words(BALLAST, f"--directory={training.directory}")
    where = "export MASTER_ADDR=$(hostname) MASTER_PORT=29511"
    training.submit(f"{where}\nsrun python {words}", ["-N2", "--ntasks-per-node=1"])
    training.check_ended(expected)
    assert training.resumed() == [0, 8], training.story()
    newest = durable.newest(training.directory)
    assert newest is not None and newest.step == STEPS

    alone = tmp_path / "alone"
    alone.mkdir()
    more = [BALLAST, f"--steps={STEPS + 2}", f"--directory={training.directory}"]
    said = run_here(PROGRAM, alone, 1, *more)
    lines = read_lines(alone / "rank-0.jsonl")
    assert lines[0]["resumed"] == STEPS, said
    assert [line["step"] for line in lines if "step" in line] == [STEPS + 1, STEPS + 2]
    assert "random" in said, said  # what another world size cannot take over
