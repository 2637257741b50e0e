"""The Checkpointer on a device: what it asks of CUDA at a step. No device: a fake of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import Training, fake_store, restart
from fake_checkpoint_store import FakeStore
from fake_cuda import FakeCuda, install

from robust_slurm.checkpoint.copying.mark import WorkMark
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import read_snapshot
from robust_slurm.checkpoint.training.stats import Meter, Stats

REGISTERED = "register with flags 1 on device 3"


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


def test_the_first_save_registers_nothing_with_cuda(store: FakeStore, cuda: FakeCuda) -> None:
    """resume() has, for a file that the first snapshot then fits."""
    me = threading.current_thread().name
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    assert [call for call in cuda.of(me) if call.startswith("register")] == [REGISTERED]
    cuda.calls.clear()
    training.step(1)
    found = snapshot(store, 1)  # the file has the size of its layout
    assert not [call for call in cuda.of(me) if "register" in call]
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    training.ckpt.close()
    again = Training(directory=store.path.parent)  # its files are there
    restart(store, 1, store.said("saved")[0]["file"])
    assert again.ckpt.resume() == 1
    cuda.calls.clear()
    again.step(2)
    snapshot(store, 2)
    assert not [call for call in cuda.of(me) if "register" in call]
    again.ckpt.close()


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


def test_a_wait_for_what_the_gpu_computes_is_no_cost_of_saving(
    store: FakeStore, cuda: FakeCuda
) -> None:
    """The first snapshots are copied inside save(), which has to wait for the step itself."""
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    training.step(1)
    training.step(2, save=False)
    cuda.compute.busy(0.3)
    training.ckpt.save(2)
    training.step(3)
    assert training.ckpt.stats.blocked_s == pytest.approx(0.3)
    assert store.wait("saved", 3)[2]["blocked_s"] == 0.0
    training.ckpt.close()


def test_what_the_gpu_waits_for_counts_though_the_host_waits_for_nothing(
    store: FakeStore, cuda: FakeCuda
) -> None:
    """The optimizer's kernels wait for the copy; the hook returns at once."""
    store.welcome |= {"every": 2, "first": 0}  # else the hook waits for the replica
    training = Training(directory=store.path.parent)
    training.ckpt.resume()
    training.run(1, 7)
    store.wait("saved", 3)
    session = training.ckpt._session
    assert session is not None and session.saver is not None
    session.saver._guard._seconds = 60.0  # too long for a comparison, which would wait for the copy
    cuda.copy_s = 0.3
    cuda.may_end.clear()
    training.step(8)
    copy = session.saver._copy
    assert copy is not None and copy._issued.wait(20)
    cuda.copy_s = 0.0
    before = training.ckpt.stats.waited_s
    training.optimizer.step()
    assert training.ckpt.stats.waited_s == before
    cuda.may_end.set()
    training.run(9, 10)
    assert store.wait("saved", 5)[4]["blocked_s"] == pytest.approx(0.3)
    training.ckpt.close()


def test_few_events_are_kept_however_few_steps_are_saved(cuda: FakeCuda) -> None:
    meter = Meter(Stats())
    meter.begin(1)
    meter.cost(0.0)  # of what was before; step 1 is saved
    for step in range(2, 100):
        begin = WorkMark()
        with meter.standing():
            cuda.compute.busy(0.01)
        begin.since(begin)  # the device comes as far as a step back
        meter.begin(step)
        assert meter._then is not None and len(meter._then.spans) < 4
    cost = meter.cost(5.0)()
    assert cost.blocked_s == pytest.approx(98 * 0.01) and cost.replica_s == 5.0
