"""--robust-verify-every: other nodes compute a step again, in a real training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ckpt_jobs import CheckpointJob, Undisturbed, survivors, undisturbed
from conftest import LabFactory
from jobs import REPOSITORY
from torch_forks import TorchForks

from lab import Cluster

pytest.importorskip("torch")

WRONG = REPOSITORY / "tests" / "programs" / "wrong"
EVERY, STEPS = 25, 65
TWO_NODES = ["-N2", "--ntasks-per-node=1"]
PACE = "--pause=0.06"  # s; then about 30 steps are made until all have heard of a check
WAIT = 240.0


class VerifyJob(CheckpointJob):
    """A training whose machines are tested, by the quick test alone, where results differ.

    ``bad``: the node that computes wrongly, in its tests as well.
    """

    bad = "-"

    def exports(self) -> dict[str, str]:
        return super().exports() | {
            "ROBUST_STOP_TESTS": "100",
            "PYTHONPATH": f"{WRONG}:{REPOSITORY}",
            "LAB_WRONG": "flip",
            "LAB_WRONG_NODE": self.bad,
            "LAB_BRIEF": "1",
            "LAB_WRONG_FILE": str(self.dir / "wrong"),
            "SLURM_LAB_GRES": "shard:1",
        }

    def checks(self) -> list[dict[str, Any]]:
        return self.events("check")

    def check_nobody_blamed(self) -> None:
        """No failure, no budget, no node that left."""
        assert self.incidents() == [] and self.accusations() == {}, self.story()
        assert self.events("failure") == [] and self.events("released") == [], self.story()
        assert {n["role"] for n in self.rosters()[0]["nodes"]} <= {"active", "spare", "released"}


@pytest.fixture(scope="module")
def two(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(torch_forks, "stop_ddp.py", tmp_path_factory.mktemp("two"), 2, STEPS)


def job(lab: Cluster, model: Undisturbed, bad: str = "-") -> VerifyJob:
    plain = model.job(lab)
    made = VerifyJob(plain.lab, plain.dir, plain.world, plain.steps, model=model)
    made.bad = bad
    return made


def test_steps_that_other_nodes_compute_alike(lab: Cluster, two: Undisturbed) -> None:
    """The training does what it does undisturbed, to the last bit, on nodes that change places."""
    training = job(lab, two)
    training.start(f"--robust-verify-every={EVERY}", PACE, sbatch=TWO_NODES)
    assert training.wait_end(WAIT) == 0, training.story()
    training.check_curves()
    training.check_nobody_blamed()
    checks = training.checks()
    assert checks and all(check["outcome"] == "agree" for check in checks), training.story()
    assert all(check["step"] % EVERY == 0 and check["seconds"] > 0 for check in checks)
    places = [event["nodes"] for event in training.events("epoch")]
    assert len(places) == len(checks) + 1, training.story()  # one restart each
    assert all(set(p) == {"n1", "n2"} and p != q for p, q in itertools.pairwise(places))
    assert training.resumed()[1:] == [check["step"] - 1 for check in checks]
    roster = training.rosters()[0]
    assert roster["incidents"] == 0 and roster["lost_steps"] == 0
    assert roster["checkpoint"]["checked"].startswith(f"{len(checks)} step"), roster
    again = {check["step"] for check in checks}  # those that were on disk before the next restart
    for mark in training.events("mark"):
        assert mark["recomputed"] == (mark["step"] in again), training.story()
    training.check_gone()


def test_a_step_that_depends_on_the_node_proves_nothing(lab: Cluster, two: Undisturbed) -> None:
    """The machines are tested, and as none fails, none leaves."""
    training = job(lab, two)
    training.start(
        f"--robust-verify-every={EVERY}", f"{PACE} --vary=n2", sbatch=TWO_NODES, durable=False
    )
    assert training.wait_end(WAIT) == 0, training.story()
    training.check_nobody_blamed()
    checks = training.checks()
    assert checks and all(check["outcome"] == "machine" for check in checks), training.story()
    tests = training.events("tests")
    assert len(tests) == len(checks) <= 2, training.story()
    assert all(set(each["cleared"]) == {"n1", "n2"} for each in tests), training.story()
    assert {tuple(check["nodes"]) for check in checks} == {("n1", "n2")}  # as it was
    for rank in training.ranks:
        assert list(survivors(training.lines(rank))) == list(range(1, STEPS + 1))


def test_a_program_that_is_not_deterministic(lab: Cluster, two: Undisturbed) -> None:
    """Report it once, test nothing, and check no other step."""
    training = job(lab, two)
    training.start(
        f"--robust-verify-every={EVERY}", f"{PACE} --vary=always", sbatch=TWO_NODES, durable=False
    )
    assert training.wait_end(WAIT) == 0, training.story()
    training.check_nobody_blamed()
    (check,) = training.checks()
    assert check["outcome"] == "program" and training.events("tests") == [], training.story()
    assert training.out().count("not deterministic") == 1, training.out()
    assert len(training.events("epoch")) == 3, training.story()
    for rank in training.ranks:
        assert list(survivors(training.lines(rank))) == list(range(1, STEPS + 1))


def test_a_fault_amid_a_check(lab: Cluster, two: Undisturbed) -> None:
    """A rank dies as it computes a step again: one failure, mended as ever, and no verdict."""
    training = job(lab, two)
    kills = ",".join(f"2:{step}:1" for step in range(EVERY, STEPS, EVERY))
    training.start(
        f"--robust-verify-every={EVERY}",
        f"{PACE} --kill={kills}",
        sbatch=TWO_NODES,
        durable=False,
    )
    assert training.wait_end(WAIT) == 0, training.story()
    training.check_curves()
    first, *later = training.checks()
    assert first["outcome"] == "interrupted", training.story()
    assert all(check["outcome"] == "agree" for check in later), training.story()
    incident = training.only_incident(symptom="crash", action="restart", outcome="recovered")
    assert incident["lost_steps"] <= 1, training.story()
    assert training.resumed()[1:3] == [first["step"] - 1] * 2, training.story()


def test_a_machine_that_is_proven_to_compute_wrongly(new_lab: LabFactory, two: Undisturbed) -> None:
    """The machine leaves as after any failure; training resumes from before its steps."""
    lab = new_lab(nodes=3, standby=0)
    training = job(lab, two, bad="n2")
    training.start(
        f"--robust-spares=1 --robust-verify-every={EVERY}",
        f"{PACE} --wrong=1:20",
        sbatch=["-N3", "--ntasks-per-node=1"],
        durable=False,
    )
    assert training.wait_end(WAIT) == 0, training.story()
    first, *later = training.checks()
    assert first["outcome"] == "proven", training.story()
    assert all(check["outcome"] == "agree" for check in later), training.story()
    incident = training.only_incident(symptom="differs", cause="node", suspects=["n2"])
    assert incident["swaps"] == [["n2", "n3"]], training.story()
    assert set(training.accusations()) == {"n2"}, training.story()
