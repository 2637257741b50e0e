"""The store's way to the durable tier, with a writer that can misbehave."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import writing_stores
from checkpoint_stores import Events, write_snapshot
from waiting import until
from writing_stores import commits, durable_rank, requests

from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    CommittedEvent,
    FetchOutcome,
    PersistedEvent,
)
from robust_slurm.checkpoint.store.store import Store

fake_writer, alone = writing_stores.fake_writer, writing_stores.alone


def test_a_persisted_step_is_written_then_committed_by_rank_0(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, keep=3)
    data = rank.save(10, persist=True)
    done = events.wait(PersistedEvent)
    assert done._replace(seconds=0) == PersistedEvent(0, 10, True, "", 0)
    assert events.wait(CommittedEvent) == CommittedEvent(10, True, "")
    assert (tmp_path / "ckpt/good/job7.e0-0-10").read_bytes() == data
    write, commit = requests(tmp_path)
    assert write["source"] == str(store.socket_path.parent / "own-0-1.safetensors")
    assert write["digest"]
    assert commit | {"pid": 0} == {
        "op": "commit", "directory": str(tmp_path / "ckpt/good"), "step": 10, "world": 4,
        "attempt": "job7.e0", "wait": 60.0, "keep": 3, "id": commit["id"], "pid": 0,
    }  # fmt: skip
    assert store.children() == [write["pid"]]


def test_what_a_commit_notices_is_an_alarm(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    durable_rank(store, tmp_path, "commit-notes").save(10, persist=True)
    assert events.wait(AlarmEvent) == AlarmEvent(0, "another run (76) commits as well")
    assert events.wait(CommittedEvent).ok


def test_other_ranks_do_not_commit_and_the_writer_stays(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, number=2)
    for step in (10, 20):
        rank.save(step, persist=True)
        events.wait(PersistedEvent, lambda e, s=step: e.step == s and e.ok)
    assert [r["op"] for r in requests(tmp_path)] == ["write", "write"]
    assert len({r["pid"] for r in requests(tmp_path)}) == 1
    assert events.of(CommittedEvent) == []


def test_a_step_that_its_rank_withdraws_while_it_is_written_is_not_committed(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "waits")
    rank.save(1, persist=True)
    until(lambda: requests(tmp_path), "the write has begun")
    rank.say(op="unusable", step=1, file="own-0-1.safetensors", why="swapped", torn=True)
    events.wait(AlarmEvent)
    (tmp_path / "ckpt/go").touch()
    done = events.wait(PersistedEvent)
    assert not done.ok and "swapped" in done.why
    assert not events.wait(CommittedEvent).ok
    assert [r["op"] for r in requests(tmp_path)] == ["write"]


def test_the_slot_is_held_while_it_is_written(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "waits", number=1)
    rank.save(1, persist=True)
    assert rank.wait("kept", step=1)["held"] == [1]
    rank.save(2)
    assert rank.wait("kept", step=2)["held"] == [1]
    rank.save(3, persist=True)  # still busy: passed over
    assert rank.wait("kept", step=3)["held"] == [1]
    over = events.wait(PersistedEvent)
    assert (over.step, over.ok) == (3, False)
    assert "still being written" in over.why
    (tmp_path / "ckpt/go").touch()
    rank.wait("held", slots=[])
    assert events.wait(PersistedEvent, lambda e: e.step == 1).ok


def test_a_rank_that_comes_again_knows_what_is_held_and_asked_for_before_it_is_welcome(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "waits", number=1)
    rank.save(1, persist=True)
    assert rank.wait("kept", step=1)["held"] == [1]
    store.persist_at(9)
    again = durable_rank(store, tmp_path, "waits", number=1)
    assert [m["op"] for m in again.messages] == ["held", "persist_at", "welcome"]
    assert (again.messages[0]["slots"], again.messages[1]["step"]) == ([1], 9)
    (tmp_path / "ckpt/go").touch()
    again.wait("held", slots=[])
    assert events.wait(PersistedEvent, lambda e: e.step == 1).ok


def test_a_commit_that_waits_for_other_ranks_does_not_hold_up_the_next_write(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "commit-waits")
    for step in (10, 20, 30):
        rank.save(step, persist=True)
        events.wait(PersistedEvent, lambda e, step=step: e.step == step and e.ok)
        until(lambda step=step: ("commit", step) in commits(tmp_path), f"commit of {step}")
    assert events.of(CommittedEvent) == []
    rank.say(op="flush", step=30)
    (tmp_path / "ckpt/go").touch()
    for step in (10, 20, 30):
        assert events.wait(CommittedEvent, lambda e, step=step: e.step == step).ok
    assert rank.wait("flushed")["ok"]
    assert len({request["pid"] for request in requests(tmp_path)}) == 1


def test_persist_at_works_before_and_after_the_step(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, number=1)
    store.persist_at(2)
    for step in (1, 2, 3):
        rank.save(step)
        rank.wait("kept", step=step)
    assert events.wait(PersistedEvent).step == 2
    store.persist_at(3)
    assert events.wait(PersistedEvent, lambda e: e.step == 3).ok


def test_the_writer_starts_beside_the_training(alone: tuple[Store, Events], tmp_path: Path) -> None:
    """The writer imports torch, for seconds, before there is something to write."""
    store, events = alone
    rank = durable_rank(store, tmp_path, number=1)
    until(lambda: store.children(), "the writer runs")
    rank.save(1, persist=True)
    assert events.wait(PersistedEvent).ok
    assert {request["pid"] for request in requests(tmp_path)} == set(store.children())


def test_a_step_that_is_being_committed_is_not_written_and_committed_again(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "commit-waits")
    rank.save(10, persist=True)
    until(lambda: ("commit", 10) in commits(tmp_path), "committing")
    rank.say(op="flush", step=10)
    found = [(h.owner, h.file) for h in store.stock()]
    flushed: list[FetchOutcome] = []
    flushing = threading.Thread(target=lambda: flushed.extend(store.flush(found, 10, 4, 60.0)))
    flushing.start()
    time.sleep(0.3)  # to ask again, if it did: what is queued goes to the writer at once
    (tmp_path / "ckpt/go").touch()
    assert rank.wait("flushed")["ok"]
    flushing.join(30)
    assert [outcome.ok for outcome in flushed] == [True]
    rank.messages.clear()
    rank.say(op="flush", step=10)
    assert rank.wait("flushed")["ok"]
    assert [request["op"] for request in requests(tmp_path)] == ["write", "commit"]
    assert events.of(CommittedEvent) == [CommittedEvent(10, True, "")]
    assert [event.step for event in events.of(PersistedEvent)] == [10]


def test_a_failed_commit_is_tried_again_without_writing(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "commit-fails")
    rank.save(10, persist=True)
    assert not events.wait(CommittedEvent).ok
    (tmp_path / "ckpt/go").touch()
    rank.say(op="flush", step=10)
    assert rank.wait("flushed")["ok"]
    assert [request["op"] for request in requests(tmp_path)] == ["write", "commit", "commit"]
    assert [event.ok for event in events.of(CommittedEvent)] == [False, True]


def test_what_an_epoch_that_is_over_waits_for_is_given_up_in_silence(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "commit-waits")
    rank.save(10, persist=True)
    until(lambda: ("commit", 10) in commits(tmp_path), "committing")
    store.begin(1, None)
    again = durable_rank(store, tmp_path, "commit-waits", epoch=1)
    again.save(4, persist=True)
    until(lambda: ("commit", 4) in commits(tmp_path), "committing the next epoch's")
    (tmp_path / "ckpt/go").touch()
    assert events.wait(CommittedEvent) == CommittedEvent(4, True, "")
    until(lambda: not [t for t in threading.enumerate() if t.name == "ckpt-commit"], "their end")


def test_a_write_whose_epoch_is_over_is_no_trouble(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    """The new epoch has removed the file that it reads."""
    store, events = alone
    rank = durable_rank(store, tmp_path, "waits", number=1)
    rank.save(10, persist=True)
    until(lambda: requests(tmp_path), "writing")
    store.begin(1, None)
    assert not list(store.socket_path.parent.glob("own-*"))
    (tmp_path / "ckpt/go").touch()
    again = durable_rank(store, tmp_path, "waits", number=1, epoch=1)
    again.save(4, persist=True)
    assert events.wait(PersistedEvent).step == 4
    assert not events.of(AlarmEvent)


def test_snapshots_outside_memory_go_to_the_durable_tier_only(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    staging = tmp_path / "ckpt/waits/.staging"
    staging.mkdir(parents=True)
    rank = durable_rank(store, tmp_path, "waits", number=1)
    path = staging / "own-1-0.safetensors"
    data = write_snapshot(path, 1, 7)
    rank.say(op="saved", step=7, slot=0, file=str(path), persist=True)
    assert rank.wait("kept", step=7)["held"] == [0]
    rank.wait("alone", step=7)
    (tmp_path / "ckpt/go").touch()
    rank.wait("held", slots=[])
    assert events.wait(PersistedEvent).ok
    assert (tmp_path / "ckpt/waits/job7.e0-1-7").read_bytes() == data
    assert store.stock() == []
    assert path.exists()
