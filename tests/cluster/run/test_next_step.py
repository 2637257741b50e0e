"""A second robust-srun in a script whose job has lost a node: it fits what is left.

Also the same command started again by its script after robust-srun itself was killed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import LabFactory
from jobs import Training, prepared
from waiting import until

from lab import Cluster
from srun_wrapper.decide.ladder import NOTHING_LEFT

SAY = "sh -c 'echo second $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME'"


@pytest.fixture
def lab(new_lab: LabFactory) -> Iterator[Cluster]:
    yield new_lab(nodes=4, standby=1)


HELD = ["--robust-hang-floor=90"]  # a training that a test holds is no hang


def two_steps(
    lab: Cluster, robust: str, size: str, then: str = "", hold: str = "--hold=8"
) -> Training:
    """A training that loses n2, then three ranks that say where they are; ``then``: options."""
    training = prepared(lab, 3)
    first = training.line([*robust.split(), *HELD], [hold])
    body = f"{first} || exit 9\nrobust-srun {robust} {then} {SAY}"
    training.submit(body, [*size.split(), "--ntasks-per-node=1"])
    training.wait_step(8)
    lab.crash("n2")
    return training


def places(training: Training) -> dict[str, str]:
    """Node of each rank of the second step."""
    lines = (line.split() for line in training.out().splitlines())
    said = [words for words in lines if words[:1] == ["second"]]
    assert {words[3] for words in said} == {"3"} and len(said) == 3, training.story()
    return {words[1]: words[5] for words in said}


def test_after_a_spare_was_used_the_next_step_has_one_less(lab: Cluster) -> None:
    training = two_steps(lab, "--robust-spares=1", "-N4")
    training.check_done()
    assert places(training) == {"0": "n1", "1": "n3", "2": "n4"}


def test_what_is_missing_comes_from_the_standby_partition(lab: Cluster) -> None:
    training = two_steps(lab, "", "-N3")
    training.check_done()
    assert places(training) == {"0": "n1", "1": "n3", "2": "s1"}
    assert training.says("robust-srun: s1 replaced nodes released in an earlier step of this job")
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "standby node given back")


def test_two_that_were_lost(new_lab: LabFactory) -> None:
    """22.05 takes no second resize of a job: the old step holds all its nodes for ever."""
    lab = new_lab(nodes=4, standby=2)
    training = two_steps(lab, "", "-N3 -x n4", hold="--hold=8,20")
    training.wait_says("took the ranks of n2")
    training.until(lambda: training.events("released"), "n2 given back")
    training.wait_step(20)
    lab.crash("n3")
    training.check_done()
    kept = lab.spec.slurm == "22.05"
    assert bool(training.says("cannot release n3 from the job, ")) == kept, training.out()
    # Both are asked for at once, and where no network is known Slurm says who gets which.
    found = places(training)
    assert found["0"] == "n1" and {found["1"], found["2"]} == {"s1", "s2"}, found


def test_killed_before_the_lost_node_was_released(lab: Cluster) -> None:
    training = prepared(lab, 3)
    line = training.line(["--robust-spares=1", *HELD], ["--hold=8,20"])
    training.submit(f"until {line}; do echo again; done", ["-N4", "--ntasks-per-node=1"])
    training.wait_step(8)
    lab.crash("n2")
    training.until(training.accusations, "n2 accused")
    training.kill("bin/robust-srun")
    training.go_on()
    training.check_done()
    assert "n2" not in training.events("epoch")[-1]["nodes"]


def test_nothing_to_fill_it_up_with(lab: Cluster) -> None:
    training = two_steps(lab, "", "-N3", "--robust-standby-partition=")
    assert training.wait_end() == NOTHING_LEFT, training.story()
    assert training.says("1 of the nodes released by an earlier step"), training.out()
    training.check_gone()


def test_robust_srun_is_killed_and_started_again(lab: Cluster) -> None:
    """The standby node goes with robust-srun; the next robust-srun asks for it again."""
    training = prepared(lab, 3)
    line = training.line(HELD, ["--hold=8,20"])
    training.submit(f"until {line}; do echo again; done", ["-N3", "--ntasks-per-node=1"])
    training.wait_step(8)
    lab.crash("n2")
    training.wait_says("s1 took the ranks of n2")
    training.until(lambda: training.events("released"), "n2 given back")
    training.kill("bin/robust-srun")
    training.go_on()
    training.check_done()
    assert training.says("^again$") and training.says("robust-srun: s1 replaced nodes")
    epochs = [event["nodes"] for event in training.events("epoch")]
    assert epochs[0] == ["n1", "n2", "n3"] and epochs[-1] == ["n1", "n3", "s1"]
