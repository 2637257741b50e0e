"""Stop-time tests in a real job: the machine that computes wrongly is named, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest
import wheel
from ckpt_jobs import CheckpointJob, Undisturbed, survivors, undisturbed
from conftest import LabFactory
from jobs import REPOSITORY
from torch_forks import TorchForks

pytest.importorskip("torch")

WRONG = REPOSITORY / "tests" / "programs" / "wrong"
STEPS = 30


class StopJob(CheckpointJob):
    """A training that tests the machines; ``bad`` computes wrongly when the program says so."""

    bad = "-"
    alone = True
    """True: no one shares the GPUs, so all tests may run; else only the quicker bitwise one."""
    installed = project = ""
    """The ``bin`` of a robust-slurm that is installed, and a user's directory on PYTHONPATH."""

    def exports(self) -> dict[str, str]:
        return super().exports() | {
            "ROBUST_STOP_TESTS": "150",  # on 2 cores; the ranks of other tests are there as well
            "PYTHONPATH": f"{WRONG}:{self.project or REPOSITORY}",
            **({"PATH": f"{self.installed}:$PATH"} if self.installed else {}),
            "LAB_WRONG_NODE": self.bad,
            "LAB_BRIEF": "1",
            "LAB_WRONG_FILE": str(self.dir / "wrong"),
            "SLURM_LAB_GRES": "gpu:1" if self.alone else "shard:1",
        }

    def check_as_undisturbed(self) -> None:
        for rank in self.ranks:
            assert survivors(self.lines(rank)) == self.model.curves[rank], self.story()


def job(lab: object, model: Undisturbed, bad: str, *, alone: bool = False) -> StopJob:
    plain = model.job(lab)  # type: ignore[arg-type]
    made = StopJob(plain.lab, plain.dir, plain.world, plain.steps, model=model)
    made.bad, made.alone = bad, alone
    return made


@pytest.fixture(scope="module")
def two(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(torch_forks, "stop_ddp.py", tmp_path_factory.mktemp("two"), 2, STEPS)


@pytest.fixture(scope="module")
def three(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(torch_forks, "stop_ddp.py", tmp_path_factory.mktemp("three"), 3, STEPS)


def test_a_nan_that_one_machine_makes(new_lab: LabFactory, two: Undisturbed) -> None:
    """robust-slurm is installed from its wheel; the user has a health.py, a status.py … as well."""
    lab = new_lab(nodes=3, standby=0)
    training = job(lab, two, "n2", alone=True)
    training.installed = str(wheel.install(wheel.build(lab.shared / "wheel"), lab.shared / "venv"))
    training.project = str(lab.shared / "project")
    for name in wheel.ROOMS:
        (lab.shared / "project" / name).mkdir(parents=True)
        (lab.shared / "project" / name / "__init__.py").write_text("raise SystemExit('not ours')")
    training.start(
        "--robust-spares=1", "--wrong=1:9", sbatch=["-N3", "--ntasks-per-node=1"], durable=False
    )
    assert training.wait_end(200) == 0, training.story()
    (incident,) = training.incidents()
    assert incident["symptom"] == "nan" and incident["cause"] == "node", training.story()
    assert incident["suspects"] == ["n2"] and incident["swaps"] == [["n2", "n3"]]
    assert any(line.startswith("stop-time tests name n2 in") for line in incident["tests"])
    (asked,) = training.events("tests")
    assert asked["errors"] == {} and len(asked["cleared"]) == 2, asked
    assert {"bitwise", "gemm", "memory", "pair"} <= {one["test"] for one in asked["measured"]}
    training.check_as_undisturbed()
    training.check_gone()


def test_one_that_is_proven_bad_and_nothing_can_replace(
    new_lab: LabFactory, three: Undisturbed
) -> None:
    """The job goes back to the queue without the bad node, as it cannot go on with fewer."""
    lab = new_lab(nodes=4, standby=0)
    training = job(lab, three, "n2")
    training.start("", "--wrong=1:9", sbatch=["-N3", "--ntasks-per-node=1"])
    training.until(lambda: len(training.runs()) > 1, "second run", 200)
    assert training.wait_end(100) == 0, training.story()
    (incident,) = training.incidents()
    assert (incident["action"], incident["suspects"]) == ("requeue", ["n2"]), training.story()
    assert incident["swaps"] == [] and set(training.accusations()) == {"n2"}
    assert "n2" in lab.job(training.job)["ExcNodeList"], training.story()
    assert training.runs()[-1] == ["n1", "n3", "n4"]
    training.check_as_undisturbed()


def test_errors_of_the_program_that_one_machine_causes(
    new_lab: LabFactory, two: Undisturbed
) -> None:
    """The same error twice would end the job; asked, a machine takes the blame."""
    lab = new_lab(nodes=3, standby=0)
    training = job(lab, two, "n2")
    training.start(
        "--robust-spares=1", "--wrong=1:9 --unfit=raise", sbatch=["-N3", "--ntasks-per-node=1"],
        durable=False,
    )  # fmt: skip
    assert training.wait_end(200) == 0, training.story()
    first, second = training.incidents()
    assert (first["action"], first["tests"]) == ("restart", []), training.story()
    assert second["suspects"] == ["n2"] and second["swaps"] == [["n2", "n3"]]
    training.check_as_undisturbed()


def test_a_nan_of_the_users_making_evicts_nobody(new_lab: LabFactory, two: Undisturbed) -> None:
    lab = new_lab(nodes=3, standby=0)
    training = job(lab, two, "-")
    training.start(
        "--robust-spares=1", "--nan=9", sbatch=["-N3", "--ntasks-per-node=1"], durable=False
    )
    assert training.wait_end(200) not in (0, None), training.story()
    first, second = training.incidents()
    assert first["tests"][0].startswith("2 of 2 nodes passed stop-time tests"), training.story()
    assert first["action"] == "restart" and second["action"] == "stop", training.story()
    assert not first["swaps"] + second["swaps"] and not second["tests"]
    assert not list(Path(training.state).glob("jobs/*/accusations/*")), training.story()
    assert training.says("not finite"), training.out()
