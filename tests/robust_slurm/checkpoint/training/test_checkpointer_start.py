"""The user's class at its start: arguments, environment, and where nothing can be saved."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import Training, fake_store
from fake_checkpoint_store import FakeStore
from places import REPOSITORY
from torch_forks import TorchForks, all_end_well

from robust_slurm import Checkpointer
from robust_slurm.checkpoint.training import mesh as meshes
from robust_slurm.resizing.dimensions import DATA


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, ValueError, "nothing to save"),
        ({"model": 3}, TypeError, "model"),
        ({"optimizer": object()}, TypeError, "optimizer"),
        ({"extra": [1]}, TypeError, "extra: a dict"),
        ({"extra": {"a": 1}, "mesh": {"dp": 2}}, ValueError, "product is the world size"),
        ({"extra": {"a": 1}, "mesh": {"dp": 0}}, ValueError, "size 0"),
        ({"extra": {"a": 1}, "mesh": {1: 1}}, TypeError, "names to sizes"),
        ({"extra": {"a": 1}, "mesh": "dp"}, TypeError, "mesh: a dict"),
        ({"extra": {"a": 1}, "every": 5}, ValueError, "without a directory"),
        ({"extra": {"a": 1}, "directory": "d", "every": -1}, ValueError, "every: 0 or more"),
        ({"extra": {"a": 1}, "directory": "d", "keep": 0}, ValueError, "keep: 1 or more"),
        ({"extra": {"a": 1}, "directory": 5}, TypeError, "directory: a path"),
        ({"extra": {"a": 1}, "replica_wait": -1}, ValueError, "replica_wait"),
        ({"extra": {"a": 1}, "replica_wait": "1"}, TypeError, "replica_wait"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Checkpointer(**given)


@pytest.mark.parametrize("name", ["dp_replicate", "dp", *sorted(DATA - {"dp_replicate", "dp"})])
def test_only_ranks_along_dp_or_dp_replicate_are_taken_to_hold_the_same_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks along ``data`` kept a part each, too, and one that differed might cost its node."""
    monkeypatch.setattr(meshes, "is_distributed", lambda: True)
    found = meshes.find_share([torch.nn.Linear(2, 2)], {name: 2, "pp": 2}, 3)
    if name in ("dp", "dp_replicate"):
        assert found is not None and found.holders == (1, 3)
    else:
        assert found is None


def test_defaults_come_from_the_environment(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBUST_CHECKPOINT_DIR", str(tmp_path / "d"))
    monkeypatch.setenv("ROBUST_CHECKPOINT_EVERY", "7")
    monkeypatch.setenv("ROBUST_CHECKPOINT_KEEP", "4")
    with Training().ckpt as ckpt:
        ckpt.resume()
    enrol = store.wait("enrol")[0]
    assert (enrol["directory"], enrol["every"], enrol["keep"]) == (str(tmp_path / "d"), 7, 4)
    monkeypatch.setenv("ROBUST_CHECKPOINT_EVERY", "often")
    with pytest.raises(ValueError, match="ROBUST_CHECKPOINT_EVERY: a whole number"):
        Training()


def test_outside_robust_srun_without_a_directory_training_goes_on(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROBUST_CKPT_SOCKET")
    monkeypatch.delenv("ROBUST_EPOCH")
    training = Training()
    assert training.ckpt.resume() == 0
    training.run(1, 3)
    training.ckpt.close()
    assert capfd.readouterr().err.count("Pass directory= to Checkpointer") == 1


def test_robust_srun_without_the_memory_tier_says_why_nothing_is_saved(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROBUST_CKPT_SOCKET")
    training = Training()
    assert training.ckpt.resume() == 0
    training.run(1, 3)
    training.ckpt.close()
    err = capfd.readouterr().err
    assert err.count("nothing is saved: robust-srun runs without checkpoints in memory") == 1
    assert "outside robust-srun" not in err


def test_no_store_to_begin_with(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBUST_CKPT_SOCKET", "/nonexistent/socket")
    training = Training()
    assert training.ckpt.resume() == 0
    training.run(1, 2)
    training.ckpt.close()
    assert "nothing is saved: no checkpoint store" in capfd.readouterr().err


def test_importing_robust_slurm_does_not_import_torch(torch_forks: TorchForks) -> None:
    code = (
        "import sys, robust_slurm; assert 'torch' not in sys.modules\n"
        "from robust_slurm import *; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
    code = "import robust_slurm; assert robust_slurm.Checkpointer.__name__ == 'Checkpointer'"
    all_end_well([torch_forks.start(code)])
