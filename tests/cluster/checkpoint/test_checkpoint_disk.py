"""Cases beyond memory: no room in it, the job's end, other launchers, another world size."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_jobs import WAIT, Undisturbed, read_lines, run_here, undisturbed
from conftest import LabFactory
from torch_forks import TorchForks

from lab import Cluster
from robust_slurm.checkpoint.durable import tier

torch = pytest.importorskip("torch")

ROBUST_CKPT = [sys.executable, "-m", "robust_slurm.checkpoint.cli"]


@pytest.fixture(scope="module")
def ddp(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("durable")
    ballast = "--ballast=1000000"  # bytes; a snapshot is three times that
    return undisturbed(torch_forks, "ckpt_ddp.py", directory, 2, 14, ballast)


@pytest.fixture(scope="module")
def little() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0) as lab:
        yield lab


@pytest.fixture(scope="module")
def alone(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A world of one rank."""
    return undisturbed(torch_forks, "ckpt_ddp.py", tmp_path_factory.mktemp("alone"), 1, 14)


def test_memory_full(little: Cluster, ddp: Undisturbed) -> None:
    """The full memory is reported, training goes on, and the checkpoints on disk serve."""
    little.fill("n2", "/dev/shm", leave=1 << 20)  # a snapshot takes 1.5 MB
    training = ddp.job(little)
    options = "--every=3 --hold=1:6"
    training.start("", options, sbatch=["-N2", "--ntasks-per-node=1"])
    training.wait_held(1, 6)
    training.until(lambda: tier.newest(training.directory), "checkpoint on disk")
    training.kill(ddp.program, rank=0)
    training.check_ended()
    assert training.resumed() == [0, 3], training.story()
    full, *_ = [text for text in training.said_alarms() if "no snapshots in memory" in text]
    assert "of /dev/shm" in full and "are free" in full
    assert training.says(f"^robust-srun: checkpoints, rank 1 on n2: {re.escape(full)}$")
    assert tier.newest(training.directory).step == ddp.steps


@pytest.mark.parametrize(
    ("files", "kept", "costs"),
    [
        (4, "2 own and 2 replicas", "each step waits until all ranks have the one before"),
        (1, "1 own and 0 replicas", "not every step is saved"),
    ],
)
def test_little_memory(
    little: Cluster, ddp: Undisturbed, files: int, kept: str, costs: str
) -> None:
    """A rung is said with its numbers, the job trains on, and a fault costs what is said."""
    size = 1_500_000  # of a snapshot, and a little more
    little.fill("n2", "/dev/shm", leave=files * size + size // 2)
    training = ddp.job(little)
    training.start("", "--every=5 --hold=1:9", sbatch=["-N2", "--ntasks-per-node=1"])
    training.wait_held(1, 9)
    training.until(lambda: tier.newest(training.directory), "checkpoint on disk")
    training.kill(ddp.program, rank=0)
    training.check_ended()
    # After the restart what was fetched takes room of its own for a while.
    said, *_ = [text for text in training.said_alarms() if "Kept:" in text]
    numbers = r"snapshots of about 1\.5 MB each: 7 .* take 11 MB of /dev/shm .*, (\S+) MB are free"
    found = re.match(numbers, said)
    assert found is not None and files * 1.5 <= float(found[1]) < (files + 1) * 1.5, said
    assert f"Kept: {kept}: " in said and costs in said
    assert training.says(f"^robust-srun: checkpoints, rank 1 on n2: {re.escape(said)}$")
    first, again = training.resumed()
    # While step 5 is written to disk, what comes after it may be left out.
    assert first == 0 and 4 <= again <= 8, training.story()
    (restored,) = training.events("restore")
    assert restored["tier"] == ("memory" if files > 1 else "shared"), training.story()
    assert len(training.incidents()) == 1, training.story()


def test_rank_and_its_replica_lost_at_once(new_lab: LabFactory, ddp: Undisturbed) -> None:
    """The newest checkpoint on disk serves, as no snapshot is left in memory; this is reported."""
    lab = new_lab(nodes=3, standby=2)
    training = ddp.job(lab)
    robust = "-N2 -n2 --relative=1"  # the batch host n1 has no rank
    training.start(robust, "--every=4 --hold=1:7", sbatch=["-N3"])
    training.wait_held(1, 7)
    training.until(lambda: tier.newest(training.directory), "checkpoint on disk")
    for node in ("n2", "n3"):
        lab.partition(node)  # at once: a crash waits until all of the node's processes are gone
    lab.crash("n2")
    lab.crash("n3")
    training.check_ended()
    assert training.resumed() == [0, 4], training.story()
    record = training.only_incident(symptom="node_lost", action="swap_standby", lost_steps=2)
    assert {old for old, _ in record["swaps"]} == {"n2", "n3"}
    assert training.events("restore")[-1]["tier"] == "shared"
    assert re.search("step 4 .*disk", record["restored"][0]), record


def test_directory_that_cannot_be_written(lab: Cluster, alone: Undisturbed) -> None:
    training = alone.job(lab)
    training.directory.mkdir(mode=0o555)  # root's: the user may not write
    training.start("", "--every=4 --kill=1:10:0", sbatch=["-N1"])
    training.check_ended()
    assert training.resumed() == [0, 9], training.story()
    training.check_lost(1)
    assert any(str(training.directory) in text for text in training.said_alarms())


def test_a_signal_requeues_the_job_and_once_cancelled_it_goes_on_elsewhere(
    new_lab: LabFactory, ddp: Undisturbed, torch_forks: TorchForks, tmp_path: Path
) -> None:
    """The newest step is written each time; plain srun takes the last up, and then plain python.

    The signal is that of Slurm before a time limit; the ranks die of it, as they have no handler.
    """
    lab = new_lab(nodes=2, standby=0, KillWait=30)  # Slurm's default
    training = ddp.job(lab)
    size = ["-N2", "--ntasks-per-node=1"]
    training.start("--robust-requeue-on=USR2", "--hold=1:6,1:11", sbatch=size)
    training.wait_held(1, 6)
    lab.exec("head", ["scancel", "-s", "USR2", str(training.job)], check=True)
    training.wait_says("^robust-srun: SIGUSR2: the job is requeued$")
    assert tier.newest(training.directory).step == 5, training.story()
    training.until(lambda: len(training.runs()) > 1, "second run")
    training.wait_held(1, 11)
    assert lab.job(training.job)["Restarts"] == "1"
    lab.exec("head", ["scancel", str(training.job)], check=True)
    training.wait_end(WAIT)
    training.check_gone()
    assert not training.incidents() and not training.accusations()
    newest = tier.newest(training.directory)
    assert newest is not None and newest.step == 10, training.story()
    checked = lab.exec("head", [*ROBUST_CKPT, "verify", str(newest.path)])
    assert checked.returncode == 0, checked
    weight = load_with_dcp(newest.path)["model.0.weight"]
    assert weight.shape == (16, 8) and bool((weight != 0).all())

    words = training.words(f"--directory={training.directory}")
    where = "export MASTER_ADDR=$(hostname) MASTER_PORT=29511"
    training.submit(f"{where}\nsrun python {words}", size)
    training.check_ended()
    assert training.resumed() == [0, 5, 10], training.story()
    newest = tier.newest(training.directory)
    assert newest is not None and newest.step == ddp.steps

    directory = tmp_path / "alone"
    directory.mkdir()
    more = [*ddp.options, f"--steps={ddp.steps + 2}", f"--directory={training.directory}"]
    (said,) = run_here(torch_forks, ddp.program, directory, 1, *more)
    lines = read_lines(directory / "rank-0.jsonl")
    assert lines[0]["resumed"] == ddp.steps, said
    assert [line["step"] for line in lines if "step" in line] == [ddp.steps + 1, ddp.steps + 2]
    assert "random" in said, said  # what another world size cannot take over


def test_resume_waits_for_a_directory_that_does_not_answer(
    alone: Undisturbed, torch_forks: TorchForks, tmp_path: Path
) -> None:
    """robust-srun names it, and the ranks go on when it answers."""
    words = [*alone.options, f"--steps={alone.steps}", f"--directory={tmp_path / 'ckpt'}"]
    run_here(torch_forks, alone.program, tmp_path, 1, *words)
    with Cluster(nodes=1, standby=0, scratch=True) as lab:
        shutil.copytree(tmp_path / "ckpt", lab.shared / "ckpt")
        copy = ["cp", "-r", str(lab.shared / "ckpt"), str(lab.scratch)]
        lab.exec("n1", copy, check=True)
        training = alone.job(lab)
        lab.stall("n1")
        directory = lab.scratch / "ckpt"
        training.start("", f"--directory={directory}", sbatch=["-N1"], durable=False)
        waits = f"resume() waits: {directory} has not answered for 5 s; "
        training.wait_says(rf"^robust-srun: checkpoints, rank 0 on n1: {re.escape(waits)}")
        lab.resume("n1")
        assert training.wait_end() == 0, training.story()
        assert training.resumed() == [alone.steps], training.story()
        assert not training.incidents(), training.story()


def load_with_dcp(directory: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, by torch.distributed.checkpoint and without us."""
    from torch.distributed import checkpoint

    metadata = checkpoint.FileSystemReader(directory).read_metadata()
    state = {
        name: torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }
    checkpoint.load(state, checkpoint_id=directory, no_dist=True)
    return state
