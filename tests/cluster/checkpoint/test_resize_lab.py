"""Pipelines go on with fewer nodes of a real Slurm, keep their batch, and grow back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ckpt_jobs import WAIT, CheckpointJob, Undisturbed
from conftest import LabFactory
from jobs import prepared
from planned_changes import check_same, check_shares, merged
from torch_forks import TorchForks

from lab import Lab
from robust_slurm.slurm.values import expand
from srun_wrapper.recover.resize.resizing import WARM_BY

pytest.importorskip("torch")

STEPS = 1000  # more than are made: a file ends the run
HELD = 7
AGAIN = 6  # steps in each world after the first
OPTION, LEFT, SHARES = "--pipeline=2", ["n1", "n3"], 2


def test_a_job_shrinks_and_grows_back_with_the_numbers_of_a_planned_change(
    new_lab: LabFactory, torch_forks: TorchForks, tmp_path: Path
) -> None:
    """4 nodes, no spare, the only standby node drained: of two pipelines one goes on, on 2 nodes;
    it is resumed, and 4 go on. DDP, FSDP2 and HSDP without Slurm: ``test_resize_whole.py``.

    The other pipeline's healthy node is a spare meanwhile. Only the crashed node leaves; each share
    of each batch is computed once; losses and state are those of runs in which the same changes
    were made without any fault, to the last bit.
    """
    lab = new_lab(nodes=4, standby=1)
    standby(lab, "drain", "reason=test")
    model = Undisturbed("ckpt_resized.py", 4, STEPS, ["--pause=0.4", OPTION], [])
    training = CheckpointJob(lab, prepared(lab, 4).dir, 4, STEPS, model=model)
    robust = f"--robust-min-nodes={len(LEFT)} --robust-warm"  # standby_wait is 30 s
    training.start(robust, f"--hold=1:{HELD}", sbatch=["-N4", "--ntasks-per-node=1"], durable=False)
    training.wait_held(1, HELD)
    training.wait_replicas(HELD - 1)
    lab.crash("n2")
    training.until(lambda: steps_in(training, 2) >= AGAIN, "steps with fewer ranks", WAIT)
    training.until(lambda: resized(training), "the incident is over")
    assert f"trains with {len(LEFT)} of its 4 ranks" in status(lab, training), training.story()
    assert not training.says("the standby node starts cold"), "there is none"
    before = sum(warm(training).values())
    standby(lab, "resume")
    training.until(lambda: "s1" in warm(training), "s1 joins", WAIT)
    came = time.time()
    training.until(lambda: steps_in(training, 3) >= AGAIN, "steps with 4 ranks again", WAIT)
    training.until(lambda: len(resized(training)) > 1, "the incident is over")
    (training.dir / "enough").touch()
    assert training.wait_end(WAIT) == 0, training.story()

    shrunk, grown = resized(training)
    assert (shrunk["action"], shrunk["resized"]) == ("shrink", [4, len(LEFT)]), training.story()
    assert (grown["symptom"], grown["resized"]) == ("grow", [len(LEFT), 4]), training.story()
    assert (shrunk["suspects"], shrunk["lost_steps"]) == (["n2"], 0), training.story()
    assert (grown["suspects"], grown["lost_steps"]) == ([], 0), training.story()
    # The ranks have not stood for a node that still imported, but for too long a time.
    assert grown["warm"] > before or grown["time"] - came > WARM_BY - 2.0, (grown, before, came)
    took = shrunk["phases"]["total"] - shrunk["phases"]["first_step"]  # imports torch
    assert took < 20.0, shrunk["phases"]  # Slurm gives no node: 5 s
    assert len(training.incidents()) == 2 and set(training.accusations()) == {"n2"}
    # While a job is COMPLETING, Slurm names the nodes that are not done yet alone.
    nodes = lab.wait_job(training.job, "COMPLETED", WAIT)["NodeList"]
    assert set(expand(nodes)) == {"n1", "n3", "n4"}
    worlds = [event["nodes"] for event in training.events("epoch")]
    assert worlds[:2] == [["n1", "n2", "n3", "n4"], LEFT] and len(worlds) == 3
    assert sorted(worlds[2]) == ["n1", "n3", "n4", "s1"]
    assert [worlds[2][worlds[0].index(node)] for node in LEFT] == LEFT
    assert f"resized 4→{len(LEFT)}" in status(lab, training)
    steps = merged(training.lines(rank) for rank in range(4))
    check_shares(steps, SHARES)
    check_same(steps, torch_forks, tmp_path, OPTION, smaller=len(LEFT))
    training.check_gone()
    still = training.in_memory()
    assert not still, still


def standby(lab: Lab, state: str, *more: str) -> None:
    argv = ["scontrol", "update", "nodename=s1", f"state={state}", *more]
    lab.exec("head", argv, user=False, check=True)


def status(lab: Lab, training: CheckpointJob) -> str:
    argv = ["robust-status", "--state-dir", str(training.state), str(training.job)]
    return lab.exec("head", argv, timeout=60).stdout


def steps_in(training: CheckpointJob, epoch: int) -> int:
    return sum("step" in li and li["epoch"] == epoch for li in training.lines(0))


def warm(training: CheckpointJob) -> dict[str, int]:
    """Ranks that would start warm, by the node that is in the job."""
    nodes = [node for roster in training.rosters() for node in roster["nodes"]]
    return {n["name"]: n["warm"] for n in nodes if n["role"] in ("active", "spare")}


def resized(training: CheckpointJob) -> list[dict[str, Any]]:
    return [i for i in training.incidents() if i["resized"] and i["outcome"] == "recovered"]
