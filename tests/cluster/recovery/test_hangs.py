"""Ranks that stand still, and others that only seem to."""

from __future__ import annotations

import pytest
from conftest import LabFactory
from jobs import TOY, check_incident, prepared, start

from lab import Cluster

# The limit is ten times the longest time between two reports with a step, and at least the floor.
QUICK_HANG = "--robust-hang-floor=2 --robust-interval=0.2"


def test_stopped_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault stop --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart", suspects=["n1"])
    assert record["phases"]["detect"] > 1.5
    assert any("rank 1 is stopped" in line for line in record["evidence"])


def test_sleeping_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault sleep --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart")
    assert any("no rank did anything" in line for line in record["evidence"])


@pytest.mark.parametrize(
    "toy",
    ["--fault phase --at 25", "--fault busy --at 25", "--fault pause --at 1"],
    ids=["phase", "unmarked evaluation", "slow first step"],
)
def test_no_false_alarm(lab: Cluster, toy: str) -> None:
    training = start(lab, 2, 2, toy=f"{toy} --seconds 5", robust=QUICK_HANG, steps=35)
    training.check_done()
    assert not training.incidents()
    assert training.rosters()[-1]["epoch"] == 1


def test_ranks_that_end_some_seconds_apart_are_no_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault linger --rank 3 --seconds 8", robust=QUICK_HANG)
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_commands_that_outlive_their_training_are_no_hang(lab: Cluster) -> None:
    """A shell uploads when its program has ended well; torchrun waits for its other ranks."""
    training = prepared(lab, 2)
    script = training.dir / "run.sh"
    words = f"python {TOY} --dir {training.dir} --steps {training.steps}"
    script.write_text(f"{words} || exit 1\nsleep 8\n")
    training.submit(f"robust-srun {QUICK_HANG} bash {script}", ["-N2", "--ntasks-per-node=1"])
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_node_that_hangs_twice_is_swapped(new_lab: LabFactory) -> None:
    lab = new_lab()
    toy = "--fault stop --at 25 --epoch 0 --node n2 --rank 2 --save 100"  # back to step 1
    training = start(lab, 2, 2, spares=1, toy=toy, robust=QUICK_HANG)
    training.check_done()
    first, second = training.incidents()
    check_incident(first, symptom="hang", action="restart", suspects=["n2"])
    check_incident(second, symptom="hang", action="swap_spare", swaps=[["n2", "n3"]])
    assert training.accusations()["n2"]["symptom"] == "hang"
