"""The store's way to the durable tier, with a writer that can misbehave."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import Events, FakeRank, stores, target, write_snapshot
from waiting import until

from robust_slurm.auto import HOOK_DIR
from robust_slurm.checkpoint.store.disk import archive
from robust_slurm.checkpoint.store.disk.writing import writer_environment
from robust_slurm.checkpoint.store.events import Alarm, Committed, Outcome, Persisted
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.training.client import Client


@pytest.fixture(autouse=True)
def _fake_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        archive,
        "writer_command",
        lambda python: [python, "-m", "tests.support.checkpoint.fake_checkpoint_writer"],
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Store, Events]]:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, key=None, write_deadline=30.0, job="j1") as made:
        yield made[0]


def _rank(
    store: Store, tmp_path: Path, mode: str = "good", number: int = 0, **more: Any
) -> FakeRank:
    directory = str(tmp_path / "ckpt" / mode)
    rank = FakeRank(store, number, directory=directory, python=sys.executable, **more)
    rank.wait("welcome")
    return rank


def _requests(tmp_path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(x) for x in (tmp_path / "ckpt/requests").read_text().splitlines()]
    except FileNotFoundError:
        return []


def test_a_persisted_step_is_written_then_committed_by_rank_0(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, keep=3)
    data = rank.save(10, persist=True)
    done = events.wait(Persisted)
    assert done._replace(seconds=0) == Persisted(0, 10, True, "", 0, len(data))
    assert events.wait(Committed) == Committed(10, True, "")
    assert (tmp_path / "ckpt/good/job7.e0-0-10").read_bytes() == data
    write, commit = _requests(tmp_path)
    assert write["source"] == str(store.socket_path.parent / "own-0-1.safetensors")
    assert write["digest"]
    assert commit | {"pid": 0} == {
        "op": "commit", "directory": str(tmp_path / "ckpt/good"), "step": 10, "world": 4,
        "attempt": "job7.e0", "wait": 60.0, "keep": 3, "id": commit["id"], "pid": 0,
    }  # fmt: skip
    assert store.children() == [write["pid"]]


def test_what_a_commit_notices_is_an_alarm(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    _rank(store, tmp_path, "commit-notes").save(10, persist=True)
    assert events.wait(Alarm) == Alarm(0, "another run (76) commits as well")
    assert events.wait(Committed).ok


def test_other_ranks_do_not_commit_and_the_writer_stays(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, number=2)
    for step in (10, 20):
        rank.save(step, persist=True)
        events.wait(Persisted, lambda e, s=step: e.step == s and e.ok)
    assert [r["op"] for r in _requests(tmp_path)] == ["write", "write"]
    assert len({r["pid"] for r in _requests(tmp_path)}) == 1
    assert events.of(Committed) == []


def test_a_step_that_its_rank_withdraws_while_it_is_written_is_not_committed(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "waits")
    rank.save(1, persist=True)
    until(lambda: _requests(tmp_path), "the write has begun")
    rank.say(op="unusable", step=1, file="own-0-1.safetensors", why="swapped", torn=True)
    events.wait(Alarm)
    (tmp_path / "ckpt/go").touch()
    done = events.wait(Persisted)
    assert not done.ok and "swapped" in done.why
    assert not events.wait(Committed).ok
    assert [r["op"] for r in _requests(tmp_path)] == ["write"]


def test_the_slot_is_held_while_it_is_written(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "waits", number=1)
    rank.save(1, persist=True)
    assert rank.wait("kept", step=1)["held"] == [1]
    rank.save(2)
    assert rank.wait("kept", step=2)["held"] == [1]
    rank.save(3, persist=True)  # still busy: passed over
    assert rank.wait("kept", step=3)["held"] == [1]
    over = events.wait(Persisted)
    assert (over.step, over.ok) == (3, False)
    assert "still being written" in over.why
    (tmp_path / "ckpt/go").touch()
    rank.wait("held", slots=[])
    assert events.wait(Persisted, lambda e: e.step == 1).ok


def test_a_rank_that_comes_again_knows_what_is_held_and_asked_for_before_it_is_welcome(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "waits", number=1)
    rank.save(1, persist=True)
    assert rank.wait("kept", step=1)["held"] == [1]
    store.persist_at(9)
    again = _rank(store, tmp_path, "waits", number=1)
    assert [m["op"] for m in again.messages] == ["held", "persist_at", "welcome"]
    assert (again.messages[0]["slots"], again.messages[1]["step"]) == ([1], 9)
    (tmp_path / "ckpt/go").touch()
    again.wait("held", slots=[])
    assert events.wait(Persisted, lambda e: e.step == 1).ok


def test_a_commit_that_waits_for_other_ranks_does_not_hold_up_the_next_write(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "commit-waits")
    for step in (10, 20, 30):
        rank.save(step, persist=True)
        events.wait(Persisted, lambda e, step=step: e.step == step and e.ok)
        until(lambda step=step: ("commit", step) in _asked(tmp_path), f"commit of {step}")
    assert events.of(Committed) == []
    rank.say(op="flush", step=30)
    (tmp_path / "ckpt/go").touch()
    for step in (10, 20, 30):
        assert events.wait(Committed, lambda e, step=step: e.step == step).ok
    assert rank.wait("flushed")["ok"]
    assert len({request["pid"] for request in _requests(tmp_path)}) == 1


def _asked(tmp_path: Path) -> list[tuple[str, int]]:
    return [(r["op"], r["step"]) for r in _requests(tmp_path) if r["op"] == "commit"]


def test_persist_at_works_before_and_after_the_step(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, number=1)
    store.persist_at(2)
    for step in (1, 2, 3):
        rank.save(step)
        rank.wait("kept", step=step)
    assert events.wait(Persisted).step == 2
    store.persist_at(3)
    assert events.wait(Persisted, lambda e: e.step == 3).ok


def test_the_writer_starts_beside_the_training(alone: tuple[Store, Events], tmp_path: Path) -> None:
    """It imports torch, for seconds: not only when there is something to write."""
    store, events = alone
    rank = _rank(store, tmp_path, number=1)
    until(lambda: store.children(), "the writer runs")
    rank.save(1, persist=True)
    assert events.wait(Persisted).ok
    assert {request["pid"] for request in _requests(tmp_path)} == set(store.children())


def test_a_step_that_is_being_committed_is_not_written_and_committed_again(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "commit-waits")
    rank.save(10, persist=True)
    until(lambda: ("commit", 10) in _asked(tmp_path), "committing")
    rank.say(op="flush", step=10)
    found = [(h.owner, h.file) for h in store.stock()]
    flushed: list[Outcome] = []
    flushing = threading.Thread(target=lambda: flushed.extend(store.flush(found, 10, 4, 60.0)))
    flushing.start()
    time.sleep(0.3)  # to ask again, if it did
    (tmp_path / "ckpt/go").touch()
    assert rank.wait("flushed")["ok"]
    flushing.join(30)
    assert [outcome.ok for outcome in flushed] == [True]
    rank.messages.clear()
    rank.say(op="flush", step=10)
    assert rank.wait("flushed")["ok"]
    assert [request["op"] for request in _requests(tmp_path)] == ["write", "commit"]
    assert events.of(Committed) == [Committed(10, True, "")]
    assert [event.step for event in events.of(Persisted)] == [10]


def test_a_failed_commit_is_tried_again_without_writing(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "commit-fails")
    rank.save(10, persist=True)
    assert not events.wait(Committed).ok
    (tmp_path / "ckpt/go").touch()
    rank.say(op="flush", step=10)
    assert rank.wait("flushed")["ok"]
    assert [request["op"] for request in _requests(tmp_path)] == ["write", "commit", "commit"]
    assert [event.ok for event in events.of(Committed)] == [False, True]


def test_what_an_epoch_that_is_over_waits_for_is_given_up_in_silence(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "commit-waits")
    rank.save(10, persist=True)
    until(lambda: ("commit", 10) in _asked(tmp_path), "committing")
    store.begin(1, None)
    again = _rank(store, tmp_path, "commit-waits", epoch=1)
    again.save(4, persist=True)
    until(lambda: ("commit", 4) in _asked(tmp_path), "committing the next epoch's")
    (tmp_path / "ckpt/go").touch()
    assert events.wait(Committed) == Committed(4, True, "")
    until(lambda: not [t for t in threading.enumerate() if t.name == "ckpt-commit"], "their end")


def test_a_write_whose_epoch_is_over_is_no_trouble(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    """The new epoch has removed the file that it reads."""
    store, events = alone
    rank = _rank(store, tmp_path, "waits", number=1)
    rank.save(10, persist=True)
    until(lambda: _requests(tmp_path), "writing")
    store.begin(1, None)
    assert not list(store.socket_path.parent.glob("own-*"))
    (tmp_path / "ckpt/go").touch()
    again = _rank(store, tmp_path, "waits", number=1, epoch=1)
    again.save(4, persist=True)
    assert events.wait(Persisted).step == 4
    assert not events.of(Alarm)


@pytest.mark.parametrize(
    ("mode", "why"), [("fails", "read-only file system"), ("dies", "out of luck")]
)
def test_a_failure_is_said_and_the_next_step_is_tried_again(
    alone: tuple[Store, Events], tmp_path: Path, mode: str, why: str
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, mode)
    rank.save(1, persist=True)
    failed = events.wait(Persisted)
    assert not failed.ok
    assert why in failed.why
    assert not events.wait(Committed).ok
    rank.wait("held", slots=[])
    before = len(_requests(tmp_path))
    rank.save(2, persist=True)
    events.wait(Persisted, lambda e: e.step == 2)
    assert len(_requests(tmp_path)) > before


def test_a_writer_that_ends_by_itself_is_replaced_once(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = _rank(store, tmp_path, "dies-once", number=1)
    rank.save(1, persist=True)
    assert events.wait(Persisted).ok
    assert len({r["pid"] for r in _requests(tmp_path)}) == 2


def test_a_writer_that_hangs_is_ended_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, key=None, write_deadline=2.0) as [(store, events)]:
        rank = _rank(store, tmp_path, "hangs", number=1)
        rank.save(1, persist=True)
        until(lambda: _requests(tmp_path), "asked")
        pid = _requests(tmp_path)[0]["pid"]
        failed = events.wait(Persisted)
        assert not failed.ok
        assert "does not answer" in failed.why
        until(lambda: not Path(f"/proc/{pid}").exists(), "the hanging writer is gone")
        rank.wait("held", slots=[])


def test_close_does_not_wait_for_a_writer(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, _ = alone
    rank = _rank(store, tmp_path, "hangs")
    rank.save(1, persist=True)
    until(lambda: _requests(tmp_path), "asked")
    pid = _requests(tmp_path)[0]["pid"]
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 5
    until(lambda: not Path(f"/proc/{pid}").exists(), "the writer is gone")


def test_a_python_that_is_not_there_is_said(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = FakeRank(store, 1, directory=str(tmp_path / "ckpt/x"), python="/no/python")
    rank.save(1, persist=True)
    assert "cannot start '/no/python'" in events.wait(Persisted).why


def test_without_a_directory_nothing_is_written(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 0)
    rank.save(1, persist=True)
    assert rank.wait("kept")["held"] == []
    rank.say(op="flush", step=1)
    assert "no directory" in rank.wait("flushed")["why"]
    assert events.of(Persisted) == []


def test_a_rank_may_flush_its_newest_snapshot(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = _rank(store, tmp_path)
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
    assert [r["op"] for r in _requests(tmp_path)] == ["write", "commit"]
    assert events.wait(Committed).ok


def test_a_flush_does_not_wait_for_ranks_that_have_no_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "ALL_HERE", 0.5)
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, write_deadline=30.0) as [(store, events)]:
        rank = _rank(store, tmp_path, "commit-waits")
        rank.save(1)
        rank.wait("kept", step=1)
        rank.say(op="flush", step=1)
        answer = rank.wait("flushed")
        assert not answer["ok"] and "not all ranks" in answer["why"]
        store.place({0: None})  # all are here, as the supervisor sees it
        rank.messages.clear()
        rank.say(op="flush", step=1)
        time.sleep(1.0)
        assert not rank.heard("flushed")  # it waits for their parts
        (tmp_path / "ckpt/go").touch()
        assert rank.wait("flushed")["ok"]
        assert events.wait(Committed).ok


def test_snapshots_outside_memory_go_to_the_durable_tier_only(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    staging = tmp_path / "ckpt/waits/.staging"
    staging.mkdir(parents=True)
    rank = _rank(store, tmp_path, "waits", number=1)
    path = staging / "own-1-0.safetensors"
    data = write_snapshot(path, 1, 7)
    rank.say(op="saved", step=7, slot=0, file=str(path), persist=True)
    assert rank.wait("kept", step=7)["held"] == [0]
    rank.wait("alone", step=7)
    (tmp_path / "ckpt/go").touch()
    rank.wait("held", slots=[])
    assert events.wait(Persisted).ok
    assert (tmp_path / "ckpt/waits/job7.e0-1-7").read_bytes() == data
    assert store.stock() == []
    assert path.exists()


def test_flush_writes_own_and_other_peoples_snapshots(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 2, write_deadline=30.0) as [(a, _), (b, events)]:
        dead, here = _rank(a, tmp_path, number=0), _rank(b, tmp_path, number=1)
        a.place({0: target(b)})
        for rank in (dead, here):
            rank.save(5)
            rank.wait("kept", step=5)
        dead.wait("replicated", step=5)
        dead.die()
        found = [(h.owner, h.file) for h in b.stock() if h.step == 5]
        outcomes = b.flush([*found, (3, "own-3-0.safetensors")], 5, 4, 60.0)
        assert [(o.owner, o.ok) for o in outcomes] == [*((o, True) for o, _ in found), (3, False)]
        assert "is not here" in outcomes[-1].why
        assert events.wait(Committed) == Committed(5, True, "")
        written = sorted(p.name for p in (tmp_path / "ckpt/good").iterdir())
        assert written == ["job7.e0-0-5", "job7.e0-1-5"]


def test_flush_ends_at_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, write_deadline=30.0) as [(a, _)]:
        rank = _rank(a, tmp_path, "hangs", number=1)
        rank.save(5)
        rank.wait("kept", step=5)
        (outcome,) = a.flush([(1, "own-1-2.safetensors")], 5, 0, 1.0)
        assert not outcome.ok
        assert "within 1 s" in outcome.why


def test_the_writer_finds_our_package_and_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site")
    monkeypatch.setenv("ROBUST_BEAT_DIR", "/run")
    monkeypatch.setenv("ROBUST_AUTO", "1")
    env = writer_environment()
    assert env["PYTHONPATH"] == f"{HOOK_DIR}{os.pathsep}/site"
    assert env["ROBUST_AUTO"] == "0"
    assert "ROBUST_BEAT_DIR" not in env


def test_a_flush_of_a_step_that_could_not_be_kept_is_no_success(tmp_path: Path) -> None:
    with stores(tmp_path, 1, key=None, local_directory=str(tmp_path / "disk")) as [(store, _)]:
        enrol = {"rank": 0, "world": 1, "local": 0, "epoch": 0, "pid": 1, "needs": [0]}
        client = Client(str(store.socket_path), enrol)
        write_snapshot(store.socket_path.parent / "own-0-1.safetensors", 0, 1, world=1)
        for step, slot in ((1, 1), (2, 2)):
            client.saved(step, slot, persist=False, file=f"own-0-{slot}.safetensors", copy_s=0.1)
            assert client.wait_safe(step, 30)
        assert client.flush(1, 30) == ""
        assert client.flush(2, 30) == "step 2 could not be kept, step 1 is"
        client.close()
