"""DDP goes on with fewer nodes, keeps its global batch, and grows back, without a wrong number."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from ckpt_jobs import CheckpointJob, Line, Undisturbed, read_lines, run_here
from conftest import LabFactory
from jobs import prepared
from torch_forks import TorchForks

from lab import Lab

pytest.importorskip("torch")

PROGRAM = "ckpt_resized.py"
STEPS = 60
HELD = 7


def test_a_job_shrinks_and_grows_back_with_the_numbers_of_a_planned_change(
    new_lab: LabFactory, torch_forks: TorchForks, tmp_path: Path
) -> None:
    """4 nodes, no spare, the only standby node drained: 3 go on; it comes, and 4 go on.

    Only the crashed node leaves; each share of each batch is computed once; losses and state are
    those of runs in which the same changes were made without any fault, to the last bit.
    """
    lab = new_lab(nodes=4, standby=1)
    standby(lab, "drain", "reason=test")
    model = Undisturbed(PROGRAM, 4, STEPS, ["--pause=0.1"], [])
    training = CheckpointJob(lab, prepared(lab, 4).dir, 4, STEPS, model=model)
    robust = "--robust-min-nodes=3 --robust-standby-wait=1"
    training.start(robust, f"--hold=1:{HELD}", sbatch=["-N4", "--ntasks-per-node=1"], durable=False)
    training.wait_held(1, HELD)
    training.wait_replicas(HELD - 1)
    lab.crash("n2")
    training.until(lambda: resized(training), "the job goes on with 3 nodes", 60.0)
    standby(lab, "resume")
    training.until(lambda: len(resized(training)) > 1, "the job grows back", 90.0)
    assert training.wait_end(150.0) == 0, training.story()

    shrunk, grown = resized(training)
    assert (shrunk["action"], shrunk["resized"]) == ("shrink", [4, 3]), training.story()
    assert (grown["symptom"], grown["resized"]) == ("grow", [3, 4]), training.story()
    assert shrunk["suspects"] == ["n2"] and grown["lost_steps"] == 0, training.story()
    assert shrunk["lost_steps"] <= 1, training.story()
    assert set(training.accusations()) == {"n2"}
    worlds = [event["nodes"] for event in training.events("epoch")]
    assert worlds == [["n1", "n2", "n3", "n4"], ["n1", "n3", "n4"], ["n1", "s1", "n3", "n4"]]
    steps = merged([training.lines(rank) for rank in range(4)])
    check_shares(steps)
    check_same(steps, torch_forks, tmp_path)
    training.check_gone()


def standby(lab: Lab, state: str, *more: str) -> None:
    argv = ["scontrol", "update", "nodename=s1", f"state={state}", *more]
    lab.exec("head", argv, check=True)


def resized(training: CheckpointJob) -> list[dict[str, Any]]:
    return [i for i in training.incidents() if i["resized"] and i["outcome"] == "recovered"]


def merged(lines: list[list[Line]]) -> dict[int, Line]:
    """Each step as it counts in the end: size of the world, loss, the ranks' states, all ids."""
    epoch_of: dict[int, int] = {}
    for each in lines:
        for line in each:
            if "step" in line:
                epoch_of[line["step"]] = max(line["epoch"], epoch_of.get(line["step"], 0))
    found: dict[int, Line] = {}
    for each in lines:
        for line in each:
            if "step" in line and line["epoch"] == epoch_of[line["step"]]:
                step = found.setdefault(
                    line["step"],
                    {"size": line["size"], "loss": line["loss"], "state": set(), "ids": {}},
                )
                assert (line["size"], line["loss"]) == (step["size"], step["loss"])
                step["state"].add(line["state"])
                assert not step["ids"].keys() & line["ids"].keys(), f"computed twice: {line}"
                step["ids"] |= line["ids"]
    return found


def check_shares(steps: dict[int, Line]) -> None:
    """Every share of every step was computed, with the samples that are next in its order."""
    assert sorted(steps) == list(range(1, STEPS + 1))
    for first, second in pairwise(range(1, STEPS + 1)):
        assert set(steps[first]["ids"]) == {"0", "1", "2", "3"}
        if first % 2 and second <= STEPS:  # two steps read all data once
            ids = [i for s in (first, second) for own in steps[s]["ids"].values() for i in own]
            assert sorted(ids) == list(range(24)), (first, ids)


def check_same(steps: dict[int, Line], forks: TorchForks, directory: Path) -> None:
    """The same sizes at the same steps, each world started by hand where the last one ended."""
    phases = [
        (size, [step for step, _ in group])
        for size, group in groupby(((s, steps[s]["size"]) for s in sorted(steps)), lambda x: x[1])
    ]
    assert [size for size, _ in phases] == [4, 3, 4]
    before: list[str] = []
    for number, (size, own) in enumerate(phases):
        here = directory / str(number)
        here.mkdir()
        words = [f"--steps={own[-1]}", f"--from={own[0] - 1}", "--bare", "--pause=0", *before]
        more = ["--original=4"] if size < 4 else []
        run_here(forks, PROGRAM, here, size, *words, *more)
        planned = merged([read_lines(here / f"rank-{rank}.jsonl") for rank in range(size)])
        for step in own:
            for name in ("loss", "ids", "state"):
                assert planned[step][name] == steps[step][name], (step, name, phases)
        before = [f"--before={here}"]
