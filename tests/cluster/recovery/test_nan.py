"""A loss that is not finite: the job goes back to before it; what comes again is the program's."""

from __future__ import annotations

import pytest
from ckpt_jobs import CheckpointJob, Undisturbed, survivors, undisturbed
from torch_forks import TorchForks

from lab import Cluster
from robust_slurm.checkpoint.listing import read_listing

torch = pytest.importorskip("torch")

TWO = ["-N2", "--ntasks-per-node=1"]
AT = 12  # step of the NaN


@pytest.fixture(scope="module")
def plain(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(torch_forks, "nan_ddp.py", tmp_path_factory.mktemp("nan"), 2, 24)


def check_nobody_reported(training: CheckpointJob) -> None:
    assert training.accusations() == {} and not training.events("released"), training.story()
    for record in training.incidents():
        assert (record["symptom"], record["cause"], record["swaps"]) == ("nan", "unknown", [])


@pytest.mark.parametrize(
    ("nan", "order", "resumed"),
    [
        # The loss of step 11 was computed from state 10: that of 11 is in doubt.
        (f"1:{AT}:1:data", "early", {AT - 2}),
        # The loss of step 12 is finite, and state 12 is not.
        (f"1:{AT}:1:gradient", "early", {AT - 1}),
        # State 10 again; but the other rank has saved 13 before it knows. Where it did so in the
        # slot of 10 (it has a fourth one while its store is busy), 11 is the oldest of both.
        (f"1:{AT}:0:data", "late", {AT - 2, AT - 1}),
    ],
)
def test_a_nan_that_does_not_come_again(
    lab: Cluster, plain: Undisturbed, nan: str, order: str, resumed: set[int]
) -> None:
    training = plain.job(lab)
    training.start("", f"--nan={nan} --order={order}", sbatch=TWO, durable=False)
    assert training.wait_end(150) == 0, training.story()
    (record,) = training.incidents()
    assert (record["action"], record["outcome"]) == ("restart", "recovered"), training.story()
    assert f"is nan at step {AT if 'data' in nan else AT + 1}" in record["evidence"][0]
    first, again = training.resumed()
    assert first == 0 and again in resumed, training.story()
    for rank in training.ranks:
        assert survivors(training.lines(rank)) == plain.curves[rank], training.story()
    check_nobody_reported(training)
    training.check_gone()


def test_a_nan_of_the_programs_own(lab: Cluster, plain: Undisturbed) -> None:
    """The NaN is in the data of a rank, and follows the rank to another node: the job stops.

    The steps on disk are from before it.
    """
    training = plain.job(lab)
    training.start("--robust-spares=1", f"--nan=0:{AT}:0:data", sbatch=["-N3", *TWO[1:]])
    assert training.wait_end(150) == 120, training.story()
    first, second, third = training.incidents()
    rungs = [record["rung"] for record in (first, second, third)]
    assert rungs == ["in-place", "exchange", "same-nan"], training.story()
    assert first["rule"] == second["rule"] == "local-nan" and len(first["suspects"]) == 1
    assert (third["cause"], third["suspects"]) == ("user", []), training.story()
    assert "it follows rank 0" in third["evidence"][-1], training.story()
    assert training.says("stopped: the loss is not finite again at the same spot"), training.out()
    assert training.accusations() == {} and not training.events("released"), training.story()
    on_disk = [int(path.name.partition("-")[2]) for path in training.directory.glob("step-*")]
    assert on_disk and max(on_disk) < AT, on_disk
    training.check_gone()


def test_a_nan_of_a_machine(lab: Cluster, plain: Undisturbed) -> None:
    """The NaN stays on its machine with the data of another rank: the machine is replaced."""
    training = plain.job(lab)
    training.start(
        "--robust-spares=1", f"--nan=0:{AT}:1:machine", sbatch=["-N3", *TWO[1:]], durable=False
    )
    assert training.wait_end(150) == 0, training.story()
    bad = (training.dir / "machine").read_text()
    records = training.incidents()
    assert [record["rung"] for record in records] == ["in-place", "exchange", "spare"]
    assert [record["suspects"] for record in records] == [[bad]] * 3, training.story()
    assert [record["cause"] for record in records] == ["unknown", "unknown", "node"]
    assert list(training.accusations()) == [bad], training.story()
    for rank in training.ranks:
        assert survivors(training.lines(rank)) == plain.curves[rank], training.story()
    training.check_gone()


FLIP, SPOILT = 9, 20  # step after which a bit is another one; step of the NaN


def test_a_state_that_a_silent_fault_has_spoilt(lab: Cluster, plain: Undisturbed) -> None:
    """One rank's weight changes by a bit; every loss stays finite, until one is NaN long after it.

    Training resumes from the newest certified step, which is from before the fault, and ends with
    the bits of a run that nothing disturbed.
    """
    training = plain.job(lab)
    faults = f"--flip=1:{FLIP}:1 --nan=1:{SPOILT}:1:data"
    training.start("", f"{faults} --every=4 --pause=0.4", sbatch=TWO)
    assert training.wait_end(150) == 0, training.story()
    (record,) = training.incidents()
    assert (record["action"], record["outcome"]) == ("restart", "recovered"), training.story()
    first, resumed = training.resumed()
    assert first == 0 and 0 < resumed < FLIP, training.story()
    assert training.says(r"left out: step \d+-\d+, not certified: a loss"), training.out()
    for rank in training.ranks:
        spoilt = [li for li in training.lines(rank) if li["epoch"] == 1 and "loss" in li]
        assert spoilt[-1]["state"] != plain.curves[rank][len(spoilt)]["state"]
        assert survivors(training.lines(rank)) == plain.curves[rank], training.story()
    check_nobody_reported(training)
    training.check_gone()
    shown = {row.step: row.mark for row in read_listing(training.directory).steps}
    assert "finite loss, equal replicas" in shown.values(), shown
