"""Little or no room in memory: fewer snapshots are kept, or durable steps go by way of a disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import LONG, Training, fake_store
from fake_checkpoint_store import FakeStore
from waiting import until

from robust_slurm.checkpoint.format.layout import read_snapshot


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def test_no_room_in_memory_durable_steps_go_by_way_of_a_disk(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if str(store.path.parent) in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    training = Training(directory=tmp_path / "d", every=3)
    training.ckpt.resume()
    client = training.ckpt._session.client  # type: ignore[union-attr]
    store.tell("persist_at", step=6)
    until(lambda: client.wants(6), "asked for step 6")
    losses = training.run(1, 7)
    assert len(losses) == 7
    training.ckpt._session.saver.settle()  # type: ignore[union-attr]
    told = store.wait("saved", 2)
    assert [(m["step"], m["persist"]) for m in told] == [(3, True), (6, True)]
    assert told[1]["file"] == str(tmp_path / "d" / ".staging" / "own-0-0.safetensors")
    assert read_snapshot(told[1]["file"])[0].step == 6
    assert not list(store.path.parent.glob("*.safetensors"))
    said = capfd.readouterr().err
    assert "finds no room" in said and "by way of" in said
    training.ckpt.close()
    assert store.wait("saved", 3)[2]["step"] == 7  # the last one is not lost
    assert store.said("saved")[2]["persist"]


def test_memory_that_is_full_later_holds_fewer_snapshots(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = os.posix_fallocate

    def two_fit(fd: int, offset: int, size: int) -> None:
        if len(list(store.path.parent.glob("own-*.safetensors"))) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", two_fit)
    training = Training(replica_wait=LONG)
    training.ckpt.resume()
    for step in range(1, 7):
        training.run(step, step)
        assert store.wait("saved", step)[-1]["step"] == step
        store.tell("complete", step=step, passed=step)
    assert len(list(store.path.parent.glob("own-*.safetensors"))) == 2
    assert store.said("slots")[-1]["replicas"] == 2
    said = capfd.readouterr().err
    assert "finds no room" in said and "Kept: 2 own and 2 replicas" in said
    assert "Kept: 3" not in said and "no snapshots in memory" not in said
    training.ckpt.close()


def test_large_extras_count_when_room_is_looked_for(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Models and optimizers fit; what is in extra does not, which the first step shows."""
    monkeypatch.setattr("robust_slurm.checkpoint.training.room.free", lambda _: 3_000_000)
    average = torch.nn.Linear(1000, 1000)
    training = Training(extra={"average": average}, directory=tmp_path / "d", every=2)
    training.ckpt.resume()
    assert "are free" not in capfd.readouterr().err
    training.run(1, 3)
    told = store.wait("saved", 1)
    assert [(m["step"], m["persist"]) for m in told] == [(2, True)]  # by way of the disk
    assert not list(store.path.parent.glob("*.safetensors"))
    said = capfd.readouterr().err
    assert "are free" in said and "no snapshots in memory" in said
    training.ckpt.close()


@pytest.mark.parametrize(("free", "files"), [(9_000_000, 2), (5_000_000, 1)])
def test_where_not_all_snapshots_fit_fewer_are_kept(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    free: int, files: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("robust_slurm.checkpoint.training.room.free", lambda _: free)
    training = Training(extra={"average": torch.nn.Linear(1000, 1000)}, replica_wait=LONG)
    training.ckpt.resume()
    for step in range(1, 5):
        training.run(step, step)
        store.wait("saved", step)
        store.tell("complete", step=step, passed=step)
    assert len(list(store.path.parent.glob("own-*.safetensors"))) == files
    assert store.said("slots")[-1]["replicas"] == 0
    assert f"Kept: {files} own and 0 replicas" in capfd.readouterr().err
    training.ckpt.close()


def test_less_room_than_the_state_needs_is_known_at_start(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("robust_slurm.checkpoint.training.room.free", lambda _: 100)
    training = Training()
    training.ckpt.resume()
    assert "are free" in capfd.readouterr().err
    training.run(1, 2)
    training.ckpt.close()
    assert not store.said("saved")
