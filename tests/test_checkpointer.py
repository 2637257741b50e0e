"""The user's class, beside a stand-in for robust-task's store: what is saved, waited for, said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_checkpoint_store import FakeStore
from torch.utils.data import DataLoader

from robust_slurm import Checkpointer, CheckpointError
from robust_slurm.checkpoint.layout import read_snapshot
from robust_slurm.checkpoint.slots import map_file

LONG = 30.0  # s; a bound that no passing test comes near


class Training:
    """A small training; its losses tell whether two of them are the same."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        given: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer,
            "extra": {"schedule": self.schedule, "note": "none"}, **options,
        }  # fmt: skip
        self.ckpt = Checkpointer(**given)

    def step(self, number: int, save: bool = True) -> float:
        x = torch.randn(4, 8)
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.ckpt.extra["note"] = f"after {number}"
        if save:
            self.ckpt.save(number)
        return loss.item()

    def run(self, first: int, last: int) -> list[float]:
        return [self.step(number) for number in range(first, last + 1)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    made = FakeStore(tmp_path / "s")
    for name in list(os.environ):
        if name.startswith(("ROBUST_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROBUST_CKPT_SOCKET", str(made.path))
    monkeypatch.setenv("ROBUST_EPOCH", "3")
    monkeypatch.setenv("ROBUST_RUN_ID", "77")
    yield made
    made.die()


def restart(store: FakeStore, step: int, file: str) -> FakeStore:
    """The next epoch's welcome; the same store."""
    store.welcome["restore"] = {"step": step, "shards": {"0": file}, "tier": "memory"}
    return store


def test_every_step_is_a_complete_snapshot_the_store_knows_of(store: FakeStore) -> None:
    training = Training(mesh={"dp": 1}, directory=store.path.parent, every=2, keep=3)
    assert training.ckpt.resume() == 0
    training.run(1, 3)
    told = store.wait("saved", 3)
    assert [(m["step"], m["slot"], m["persist"]) for m in told] == [
        (1, 0, False), (2, 1, True), (3, 2, False),
    ]  # fmt: skip
    enrol = store.said("enrol")[0]
    assert (enrol["rank"], enrol["world"], enrol["epoch"], enrol["needs"]) == (0, 1, 3, [0])
    assert (enrol["mesh"], enrol["every"], enrol["keep"]) == ({"dp": 1}, 2, 3)
    assert enrol["bytes"] > 0
    path = store.path.parent / told[2]["file"]
    snapshot, plan = read_snapshot(str(path))
    assert (snapshot.step, snapshot.epoch, snapshot.job) == (3, 3, "77")
    weight = map_file(path, plan)["model.0.weight"]
    assert torch.equal(weight, training.model[0].weight)
    training.ckpt.close()
    assert training.ckpt.stats.snapshots == 3


def test_a_restart_from_memory_goes_on_bit_by_bit(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    losses = first.run(1, 8)
    first.ckpt.close()
    (file,) = [m["file"] for m in store.wait("saved", 8) if m["step"] == 6]
    second = Training()
    torch.randn(100)
    restart(store, 6, file)
    assert second.ckpt.resume() == 6
    assert store.wait("resumed")[0]["step"] == 6
    assert second.ckpt.extra["note"] == "after 6"
    assert second.run(7, 8) == losses[6:]
    second.ckpt.close()


def test_after_a_restart_the_slots_of_abandoned_steps_go_first(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    first.run(1, 6)
    first.ckpt.close()
    slots = {m["step"]: m["slot"] for m in store.wait("saved", 6)[3:]}
    store.welcome["own"] = [{"slot": slot, "step": step} for step, slot in slots.items()]
    restart(store, 5, f"own-0-{slots[5]}.safetensors")
    second = Training()
    second.ckpt.resume()
    second.step(6)
    assert store.wait("saved", 7)[-1]["slot"] == slots[6]
    second.ckpt.close()


@pytest.mark.parametrize("damage", ["gone", "torn", "other step", "other rank", "cut", "a path"])
def test_a_file_of_the_plan_that_cannot_be_used_is_told_and_ends_the_rank(
    store: FakeStore, damage: str
) -> None:
    first = Training()
    first.ckpt.resume()
    first.run(1, 2)
    first.ckpt.close()
    path = store.path.parent / store.wait("saved", 2)[1]["file"]
    step, rank, name = 2, "0", path.name
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        with path.open("r+b") as file:
            file.write(bytes(8))
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "other step":
        step = 3
    elif damage == "other rank":
        rank, name = "1", ""  # the plan has none of ours
    else:
        name = f"../s/{name}"
    store.welcome["restore"] = {"step": step, "shards": {rank: name or path.name}, "tier": "memory"}
    second = Training()
    before = [p.clone() for p in second.model.parameters()]
    with pytest.raises(CheckpointError, match="cannot be restored"):
        second.ckpt.resume()
    assert store.wait("unusable")[0]["file"] == name
    assert all(map(torch.equal, before, second.model.parameters()))
    second.ckpt.close()


def test_what_cannot_be_saved_is_refused_by_name_at_the_start(store: FakeStore) -> None:
    ckpt = Checkpointer(model=torch.nn.Linear(2, 2), extra={"f": lambda: 1})
    with pytest.raises(TypeError, match=r"extra\.f"):
        ckpt.resume()
    ckpt.close()


def test_files_of_other_ranks_of_the_node_are_left_alone(store: FakeStore) -> None:
    """In a pipeline they hold other tensors of equal names."""
    first = Training()
    first.ckpt.resume()
    losses = first.run(1, 3)
    first.ckpt.close()
    restart(store, 2, store.wait("saved", 3)[1]["file"])
    (store.path.parent / "own-1-0.safetensors").write_bytes(bytes(100))
    store.welcome["restore"]["shards"]["1"] = "own-1-0.safetensors"
    second = Training()
    assert second.ckpt.resume() == 2
    assert second.run(3, 3) == losses[2:]
    second.ckpt.close()


def test_another_model_is_an_error_that_says_so(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    first.run(1, 1)
    first.ckpt.close()
    restart(store, 1, store.wait("saved")[0]["file"])
    other = Checkpointer(model=torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="does not fit this script") as failed:
        other.resume()
    assert failed.value.__suppress_context__  # one traceback, not two
    other.close()


def test_the_optimizer_waits_until_the_step_before_is_replicated(store: FakeStore) -> None:
    store.replicates = False
    training = Training()
    training.ckpt.resume()
    training.step(1)
    weights = [p.clone() for p in training.model.parameters()]
    thread = threading.Thread(target=training.step, args=[2], daemon=True)
    thread.start()
    store.wait("saved")
    thread.join(0.3)
    assert thread.is_alive()
    assert all(map(torch.equal, weights, training.model.parameters()))
    store.tell("replicated", step=1)
    thread.join(LONG)
    assert not thread.is_alive()
    store.tell("replicated", step=2)
    training.ckpt.close()


def test_a_replica_that_does_not_come_costs_the_wait_once(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    store.replicates = False
    training = Training(replica_wait=0.2)
    training.ckpt.resume()
    training.run(1, 30)
    assert 0.2 <= training.ckpt.stats.waited_s < 3.0
    alarms = store.wait("alarm")
    assert len(alarms) == 1 and "no replica" in alarms[0]["text"]
    assert "no replica" in capfd.readouterr().err
    store.tell("replicated", step=30)
    store.replicates = True
    training.step(31)
    training.ckpt.close()


def test_a_store_that_dies_never_holds_up_the_training(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    training.ckpt.resume()
    training.run(1, 2)
    store.die()
    training.run(3, 6)
    training.ckpt.close()
    assert "store is gone" in capfd.readouterr().err


def test_no_store_to_begin_with(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBUST_CKPT_SOCKET", "/nonexistent/socket")
    training = Training()
    assert training.ckpt.resume() == 0
    training.run(1, 2)
    training.ckpt.close()
    assert "nothing is saved: no checkpoint store" in capfd.readouterr().err


def test_what_changes_too_early_is_thrown_away_once_and_then_copied_at_once(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    training.ckpt.resume()
    training.step(1)
    training.ckpt._session.saver.settle()  # type: ignore[union-attr]
    gate = threading.Event()
    saver: Any = training.ckpt._session.saver  # type: ignore[union-attr]
    saver._copier.submit(lambda: gate.wait(LONG))  # the copy begins after the change
    training.step(2)
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.01, 0.01)
    gate.set()
    training.step(3)
    gate.clear()
    saver.settle()
    saver._copier.submit(lambda: gate.wait(LONG))
    training.step(4)
    kept = training.model[0].weight.detach().clone()
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.005, 0.005)
    gate.set()
    training.ckpt.close()
    told = store.wait("saved", 3)
    assert [m["step"] for m in told] == [1, 3, 4]
    assert training.ckpt.stats.torn == 1
    assert "model.0.weight changed before" in capfd.readouterr().err
    path = store.path.parent / told[-1]["file"]
    assert torch.equal(map_file(path, read_snapshot(str(path))[1])["model.0.weight"], kept)


def test_without_an_optimizer_all_is_copied_inside_save(store: FakeStore) -> None:
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(model=model)
    ckpt.resume()
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model.weight.fill_(step)
        ckpt.save(step)
        with torch.no_grad():
            model.weight.fill_(-1)
    ckpt.close()
    for told in store.wait("saved", 4)[1:]:
        path = store.path.parent / told["file"]
        weight = map_file(path, read_snapshot(str(path))[1])["model.weight"]
        if read_snapshot(str(path))[0].step == told["step"]:
            assert weight.unique().tolist() == [told["step"]]


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


def test_less_room_than_the_state_needs_is_known_at_start(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("robust_slurm.checkpoint.room.free", lambda _: 100)
    training = Training()
    training.ckpt.resume()
    assert "are needed in" in capfd.readouterr().err
    training.run(1, 2)
    training.ckpt.close()
    assert not store.said("saved")


def test_forked_children_save_nothing_and_end_nothing(store: FakeStore) -> None:
    training = Training()
    training.ckpt.resume()
    training.step(1)
    loader = DataLoader(torch.arange(8), num_workers=2)  # type: ignore[arg-type]
    assert sum(int(x) for x in loader) == 28
    pid = os.fork()
    if pid == 0:
        training.ckpt.save(9)
        training.ckpt.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    training.step(2)
    training.ckpt.close()
    assert [m["step"] for m in store.wait("saved", 2)] == [1, 2]


def test_steps_that_do_not_rise_are_left_out(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    training.ckpt.resume()
    training.run(1, 2)
    training.ckpt.save(2)
    training.ckpt.save("three")  # type: ignore[arg-type]
    training.ckpt.close()
    assert [m["step"] for m in store.wait("saved", 2)] == [1, 2]
    said = capfd.readouterr().err
    assert "save(2) after step 2 is left out" in said and "step three was not saved" in said


def test_resume_is_called_once_and_first(store: FakeStore) -> None:
    training = Training()
    training.ckpt.resume()
    with pytest.raises(CheckpointError, match="once"):
        training.ckpt.resume()
    training.ckpt.close()


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
    assert capfd.readouterr().err.count("needs directory=") == 1


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


def test_save_returns_before_anything_is_copied(store: FakeStore) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ckpt = Checkpointer(optimizer=optimizer, model=torch.nn.ParameterList([weight]))
    ckpt.resume()
    saver_gate = threading.Event()
    for step in range(1, 5):
        ckpt.save(step)
        ckpt._session.saver.settle()  # type: ignore[union-attr]
    saver: Any = ckpt._session.saver  # type: ignore[union-attr]
    saver._copier.submit(lambda: saver_gate.wait(LONG))
    ckpt.save(5)  # returns although nothing can be copied now
    assert not saver._over.is_set()
    saver_gate.set()
    ckpt.close()
    assert store.wait("saved", 5)[-1]["step"] == 5


def test_importing_robust_slurm_does_not_import_torch() -> None:
    code = (
        "import sys, robust_slurm; assert 'torch' not in sys.modules\n"
        "from robust_slurm import *; assert 'torch' not in sys.modules\n"
        "assert robust_slurm.Checkpointer.__name__ == 'Checkpointer'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
