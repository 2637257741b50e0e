"""The Checkpointer beside a fake store: snapshots, waits for replicas, warnings."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import LONG, Training, fake_store, restart
from fake_checkpoint_store import FakeStore
from torch.utils.data import DataLoader
from waiting import until

from robust_slurm import Checkpointer, heartbeat
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import read_snapshot
from robust_slurm.checkpoint.training import moment


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


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


def test_only_the_steps_that_are_asked_for_are_saved_and_the_last(store: FakeStore) -> None:
    store.welcome |= {"every": 3, "first": 0}
    training = Training(directory=store.path.parent, every=5)
    training.ckpt.resume()
    training.run(1, 7)
    store.tell("every", every=2, first=9)
    until(lambda: training.ckpt._session.saver._client.every == 2, "the order")  # type: ignore[union-attr]
    training.run(8, 13)
    training.ckpt.close()
    told = [m["step"] for m in store.said("saved")]
    assert told == [3, 5, 6, 10, 12, 13]  # 5 goes to disk; 13 is the last


def test_a_replica_has_until_the_next_snapshot(store: FakeStore) -> None:
    store.welcome |= {"every": 3, "first": 0}
    store.replicates = False
    training = Training(replica_wait=LONG)
    training.ckpt.resume()
    training.run(1, 5)  # the optimizer does not wait
    store.tell("replicated", step=3)
    training.run(6, 6)
    assert [m["step"] for m in store.wait("saved", 2)] == [3, 6]
    store.tell("replicated", step=6)
    training.ckpt.close()


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
    # On a busy machine another step may be left out, which is said too.
    alarms = [alarm for alarm in store.wait("alarm") if "no replica" in alarm["text"]]
    assert len(alarms) == 1
    assert "no replica" in capfd.readouterr().err
    store.tell("replicated", step=30)
    store.replicates = True
    training.step(31)
    training.ckpt.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_ten_thousand_ranks_print_one_line(
    store: FakeStore, rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The supervisor counts who reports the same; also where the text holds the step."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    training = Training()
    training.ckpt.resume()
    for step in (9, 4, 3):
        training.ckpt.save(step)
    (alarm,) = store.wait("alarm")
    assert alarm["text"] == "save(4) ignored: step 9 was saved already; steps must increase"
    training.ckpt.close()
    assert len(store.said("alarm")) == 1
    assert capfd.readouterr().err.count("steps must increase") == (rank == 0)


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


def test_what_changes_too_early_is_thrown_away_once_and_then_copied_at_once(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moment, "BRIEF", 0)  # as if the state were large
    training = Training()
    training.ckpt.resume()
    training.run(1, 3)  # later than what is copied inside save() anyway
    training.ckpt._session.saver.settle()  # type: ignore[union-attr]
    gate = threading.Event()
    saver: Any = training.ckpt._session.saver  # type: ignore[union-attr]
    saver._copier.submit(lambda: gate.wait(LONG))  # the copy begins after the change
    training.step(4)
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.01, 0.01)
    gate.set()
    training.step(5)
    gate.clear()
    saver.settle()
    saver._copier.submit(lambda: gate.wait(LONG))
    training.step(6)
    kept = training.model[0].weight.detach().clone()
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.005, 0.005)
    gate.set()
    training.ckpt.close()
    told = store.wait("saved", 5)
    assert [m["step"] for m in told] == [1, 2, 3, 5, 6]
    assert training.ckpt.stats.torn == 1
    assert "model.0.weight changed before" in capfd.readouterr().err
    path = store.path.parent / told[-1]["file"]
    assert torch.equal(map_file(path, read_snapshot(str(path))[1])["model.0.weight"], kept)


def test_while_the_loss_is_not_finite_nothing_is_taken(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    training = Training(directory=tmp_path / "d", every=1)
    training.ckpt.resume()
    for step in range(1, 9):
        monkeypatch.setattr(heartbeat, "_nan", step in (4, 5, 7, 8))
        training.step(step)
    training.ckpt.close()
    assert [m["step"] for m in store.wait("saved", 4)] == [1, 2, 3, 6]
    assert not store.said("flush")  # it would write step 6 to disk
    assert capfd.readouterr().err.count("the loss is not finite") == 1


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


def test_robust_srun_asks_for_the_durable_steps_after_the_first(store: FakeStore) -> None:
    """All ranks write the same steps: what one rank cannot keep up with, no other writes."""
    training = Training(directory=store.path.parent, every=2)
    training.ckpt.resume()
    client = training.ckpt._session.client  # type: ignore[union-attr]
    store.tell("persist_at", step=7)
    until(lambda: client.wants(7), "asked for step 7")
    training.run(1, 8)
    told = store.wait("saved", 8)
    assert [m["step"] for m in told if m["persist"]] == [2, 7]
    training.ckpt.close()
    restart(store, 7, next(m["file"] for m in told if m["step"] == 7))
    second = Training(directory=store.path.parent, every=2)
    second.ckpt.resume()
    second.run(8, 12)
    told = store.wait("saved", 13)[8:]
    assert [m["step"] for m in told if m["persist"]] == [8]  # only memory has step 7
    second.ckpt.close()


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
    assert "save(2) ignored: step 2 was saved already" in said
    assert "step three was not saved" in said


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
