"""Replay end to end: a node spoils every loss, and small worlds of the job show which one it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import REPOSITORY, Training, check_incident, prepared
from lab_nodes import leave_idle
from places import CLUSTER

from lab import Cluster

TOY = CLUSTER / "nan_toy.py"
NODES, STEPS = 8, 30
MESH = "--robust-mesh=pp=2,dp=4"


@pytest.fixture(scope="module")
def wide_lab() -> Iterator[Cluster]:
    with Cluster(nodes=NODES, standby=2) as cluster:
        yield cluster


@pytest.fixture
def lab(wide_lab: Cluster) -> Iterator[Cluster]:
    yield wide_lab
    leave_idle(wide_lab)


def start(lab: Cluster, toy: str, robust: str = "") -> Training:
    training = prepared(lab, NODES, STEPS)
    options = f"--robust-replay=4 --robust-replay-limit=30 --robust-stop-tests=0 {MESH} {robust}"
    words = f"python {TOY} --dir {training.dir} --steps {STEPS} {toy}"
    training.submit(f"robust-srun {options} {words}", [f"-N{NODES}", "--ntasks-per-node=1"])
    return training


def reference() -> float:
    """The loss that nothing spoils."""
    loss = 1.0
    for step in range(1, STEPS + 1):
        loss = loss / 2 + NODES * step / 4
    return loss


def check_done(training: Training, *left: str) -> None:
    """The bad nodes have left, and training went on to its end as if nothing had been."""
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": STEPS, "loss": reference()}, training.story()
    named = [record for record in training.incidents() if record["tests"]]
    check_incident(named[-1], cause="node", suspects=list(left), outcome="recovered")
    assert set(training.accusations()) == set(left)
    training.check_gone()
    assert not training.in_memory()


# Every position is tried in test_active_replay.py; here the batch host, one that is not, and below
# the last one, beside another.
@pytest.mark.parametrize("bad", ["n1", "n2"])
def test_the_bad_node_is_found_wherever_it_is(lab: Cluster, bad: str) -> None:
    """Worlds of two nodes each; a stage of the job's pipeline is always in the same place."""
    training = start(lab, f"--bad {bad}")
    check_done(training, bad)
    replays = training.events("replay")
    assert len(replays) == 2, training.story()
    for each in replays:
        failed = [group for group in each["groups"] if group["result"] == "bad"]
        assert len(failed) == 1 and bad in failed[0]["nodes"], training.story()
    assert training.says(f"^robust-srun: 2 replays: {bad} bad")
    logs = sorted(training.dir.glob("replays.*"))
    assert len(logs) == 2
    for log in logs:
        ran = [line.split() for line in log.read_text().splitlines()]
        assert sorted((group, rank) for group, rank, _ in ran) == [
            (str(group), str(rank)) for group in range(4) for rank in range(2)
        ]
        stages = {rank: {node for _, of, node in ran if of == rank} for rank in ("0", "1")}
        assert stages["0"] == {"n1", "n2", "n3", "n4"}
        assert stages["1"] == {"n5", "n6", "n7", "n8"}


def test_an_error_that_every_rank_raises(lab: Cluster) -> None:
    """The error looks like the program's own: without a replay the job would stop here."""
    training = start(lab, "--bad n6 --raise")
    check_done(training, "n6")


def test_two_bad_nodes(lab: Cluster) -> None:
    training = start(lab, "--bad n3,n8")
    check_done(training, "n3", "n8")
    assert len(training.events("replay")) == 3


def test_losses_that_are_only_wrong(lab: Cluster) -> None:
    training = start(lab, "--bad n4 --quietly", "--robust-replay-fixed")
    check_done(training, "n4")
    bad = [g["why"] for e in training.events("replay") for g in e["groups"] if g["why"]]
    assert bad == ["its loss differs from that of the 3 other groups"] * 2


def test_the_programs_own_nan_blames_nobody(lab: Cluster) -> None:
    everyone = ",".join(f"n{number}" for number in range(1, NODES + 1))
    training = start(lab, f"--bad {everyone}")
    assert training.wait_end() == 120, training.story()
    (replay,) = training.events("replay")
    assert {group["result"] for group in replay["groups"]} == {"bad"}
    assert training.says("every group fails: the program is at fault")
    assert not training.accusations()
    training.check_gone()


def test_a_mesh_that_cannot_be_made_smaller(lab: Cluster) -> None:
    training = start(lab, "--bad n2", "--robust-mesh=pp=8")
    assert training.wait_end() == 120, training.story()
    assert training.says("the job cannot be replayed: no dimension of the mesh")
    assert not training.events("replay")


def test_what_memory_holds_is_there_after_a_replay(lab: Cluster) -> None:
    """Replays save nothing, restore nothing, and take nothing away."""
    pytest.importorskip("torch")
    training = prepared(lab, 3, STEPS)
    options = "--robust-replay=4 --robust-stop-tests=0 --robust-mesh=dp=3"
    program = REPOSITORY / "tests" / "programs" / "ckpt_spoilt.py"
    line = f"robust-srun {options} python {program} --bad n3 --dir {training.dir}"
    training.submit(line, ["-N3", "--ntasks-per-node=1"])
    assert training.wait_end(240.0) == 0, training.story()
    said = [line.split()[1:] for line in training.out().splitlines() if line.startswith("resumed")]
    replayed = [int(step) for _, step, replay in said if replay == "1"]
    resumed = [int(step) for _, step, replay in said if replay == "0"]
    assert len(replayed) == 2 * 3 and set(replayed) == {0}, training.story()
    assert resumed[:3] == [0] * 3 and set(resumed[3:]) == {11}, training.story()
    assert training.out().count(f"sum {float(sum(range(STEPS + 1)))}") == 3
    assert set(training.accusations()) == {"n3"}
    training.check_gone()
