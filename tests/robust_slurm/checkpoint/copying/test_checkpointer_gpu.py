"""The Checkpointer on a device: what it asks of CUDA at a step. No device: a fake of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import Training, fake_store
from fake_checkpoint_store import FakeStore
from fake_cuda import FakeCuda, install

from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import read_snapshot


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def snapshot(store: FakeStore, step: int) -> dict[str, torch.Tensor]:
    told = store.wait("saved", step)[step - 1]
    path = store.path.parent / told["file"]
    read, plan = read_snapshot(str(path))
    assert read.step == told["step"] == step
    return map_file(path, plan)


def test_every_step_arrives_and_no_step_makes_the_host_wait_for_the_device(
    store: FakeStore, cuda: FakeCuda
) -> None:
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    training.run(1, 5)
    store.wait("saved", 5)
    cuda.calls.clear()
    training.step(6)
    found = snapshot(store, 6)
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    mine = cuda.of(threading.current_thread().name)
    assert not [call for call in mine if call.startswith("host waits")]
    assert not store.said("alarm")
    training.ckpt.close()


def test_while_a_graph_is_captured_nothing_is_asked_of_cuda(
    store: FakeStore, cuda: FakeCuda
) -> None:
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    training.run(1, 5)
    store.wait("saved", 5)
    cuda.calls.clear()
    cuda.capturing = True
    training.optimizer.zero_grad()
    training.optimizer.step()  # only captured: no tensor changes
    training.ckpt.save(6)
    training.ckpt.save(7)
    assert not cuda.calls
    cuda.capturing = False
    training.run(8, 9)
    told = [message["step"] for message in store.wait("saved", 7)]
    assert told == [1, 2, 3, 4, 5, 8, 9]
    (alarm,) = store.wait("alarm")
    assert "step 6 is not saved: save() was called while a CUDA graph" in alarm["text"]
    training.ckpt.close()


def test_memory_that_cannot_be_registered_is_one_alarm(store: FakeStore, cuda: FakeCuda) -> None:
    cuda.runtime.error = 2
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    training.run(1, 5)
    snapshot(store, 5)
    (alarm,) = store.wait("alarm")
    assert "cannot register" in alarm["text"] and "out of memory" in alarm["text"]
    training.ckpt.close()
