"""Flushing: a snapshot is written at once, and the caller waits for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import writing_stores
from checkpoint_stores import Events, FakeRank, stores, target, write_snapshot
from writing_stores import durable_rank, requests

from robust_slurm.checkpoint.store.disk import archive
from robust_slurm.checkpoint.store.events import CommittedEvent, PersistedEvent
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.training.client import Client

fake_writer, alone = writing_stores.fake_writer, writing_stores.alone


def test_without_a_directory_nothing_is_written(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 0)
    rank.save(1, persist=True)
    assert rank.wait("kept")["held"] == []
    rank.say(op="flush", step=1)
    assert "no directory" in rank.wait("flushed")["why"]
    assert events.of(PersistedEvent) == []


def test_a_rank_may_flush_its_newest_snapshot(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path)
    rank.say(op="flush", step=0)
    assert rank.wait("flushed")["why"] == "nothing was saved"
    rank.messages.clear()
    rank.save(1)
    rank.save(2)
    rank.wait("kept", step=2)
    for _ in range(2):  # what is written is not written again
        rank.messages.clear()
        rank.say(op="flush", step=2)
        assert rank.wait("flushed") == {"op": "flushed", "step": 2, "ok": True, "why": ""}
    assert [r["op"] for r in requests(tmp_path)] == ["write", "commit"]
    assert events.wait(CommittedEvent).ok


def test_a_flush_does_not_wait_for_ranks_that_have_no_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "ALL_HERE", 0.5)
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, write_deadline=30.0) as [(store, events)]:
        rank = durable_rank(store, tmp_path, "commit-waits")
        rank.save(1)
        rank.wait("kept", step=1)
        rank.say(op="flush", step=1)
        answer = rank.wait("flushed")
        assert not answer["ok"] and "not all ranks" in answer["why"]
        store.place({0: None})  # all are here, as the supervisor sees it
        rank.messages.clear()
        rank.say(op="flush", step=1)
        time.sleep(2 * archive.ALL_HERE)  # after which it looks at who is here
        assert not rank.heard("flushed")  # it waits for their parts
        (tmp_path / "ckpt/go").touch()
        assert rank.wait("flushed")["ok"]
        assert events.wait(CommittedEvent).ok


def test_flush_writes_own_and_other_peoples_snapshots(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 2, write_deadline=30.0) as [(a, _), (b, events)]:
        dead, here = durable_rank(a, tmp_path, number=0), durable_rank(b, tmp_path, number=1)
        a.place({0: target(b)})
        for rank in (dead, here):
            rank.save(5)
            rank.wait("kept", step=5)
        dead.wait("replicated", step=5)
        dead.die()
        found = [(h.owner, h.file) for h in b.stock() if h.step == 5]
        outcomes = b.flush([*found, (3, "own-3-0.safetensors")], 5, 4, 600.0)
        assert [(o.owner, o.ok) for o in outcomes] == [*((o, True) for o, _ in found), (3, False)]
        assert "is not here" in outcomes[-1].why
        assert events.wait(CommittedEvent) == CommittedEvent(5, True, "")
        written = sorted(p.name for p in (tmp_path / "ckpt/good").iterdir())
        assert written == ["job7.e0-0-5", "job7.e0-1-5"]
        waits = [request["wait"] for request in requests(tmp_path) if request["op"] == "commit"]
        assert waits == [600.0]  # other nodes' writers have as long


def test_flush_ends_at_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, write_deadline=30.0) as [(a, _)]:
        rank = durable_rank(a, tmp_path, "hangs", number=1)
        rank.save(5)
        rank.wait("kept", step=5)
        (outcome,) = a.flush([(1, "own-1-2.safetensors")], 5, 0, 1.0)
        assert not outcome.ok
        assert "within 1 s" in outcome.why


def test_a_flush_of_a_step_that_could_not_be_kept_is_no_success(tmp_path: Path) -> None:
    with stores(tmp_path, 1, key=None) as [(store, _)]:
        enrol = {"rank": 0, "world": 1, "local": 0, "epoch": 0, "pid": 1, "needs": [0]}
        (tmp_path / "ckpt").mkdir()
        enrol |= {"directory": str(tmp_path / "ckpt/good"), "python": sys.executable}
        client = Client(str(store.socket_path), enrol)
        write_snapshot(store.socket_path.parent / "own-0-1.safetensors", 0, 1, world=1)
        for step, slot in ((1, 1), (2, 2)):
            client.saved(step, slot, persist=False, file=f"own-0-{slot}.safetensors", copy_s=0.1)
            assert client.wait_safe(step, 30)
        assert client.flush(1, 30) == ""
        assert client.flush(2, 30) == "step 2 could not be kept, step 1 is"
        client.close()
