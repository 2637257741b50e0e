"""A writer that fails, ends, hangs or cannot be started."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import writing_stores
from checkpoint_stores import Events, FakeRank, stores
from waiting import until
from writing_stores import durable_rank, requests

from robust_slurm.auto import HOOK_DIR
from robust_slurm.checkpoint.store.disk import writing
from robust_slurm.checkpoint.store.disk.writing import writer_environment
from robust_slurm.checkpoint.store.events import CommittedEvent, PersistedEvent
from robust_slurm.checkpoint.store.store import Store

fake_writer, alone = writing_stores.fake_writer, writing_stores.alone


@pytest.mark.parametrize(
    ("mode", "why"), [("fails", "read-only file system"), ("dies", "out of luck")]
)
def test_a_failure_is_said_and_the_next_step_is_tried_again(
    alone: tuple[Store, Events], tmp_path: Path, mode: str, why: str
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, mode)
    rank.save(1, persist=True)
    failed = events.wait(PersistedEvent)
    assert not failed.ok
    assert why in failed.why
    assert not events.wait(CommittedEvent).ok
    rank.wait("held", slots=[])
    before = len(requests(tmp_path))
    rank.save(2, persist=True)
    events.wait(PersistedEvent, lambda e: e.step == 2)
    assert len(requests(tmp_path)) > before


def test_a_writer_that_ends_by_itself_is_replaced_once(
    alone: tuple[Store, Events], tmp_path: Path
) -> None:
    store, events = alone
    rank = durable_rank(store, tmp_path, "dies-once", number=1)
    rank.save(1, persist=True)
    assert events.wait(PersistedEvent).ok
    assert len({r["pid"] for r in requests(tmp_path)}) == 2


def test_a_writer_that_hangs_is_ended_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, key=None, write_deadline=2.0) as [(store, events)]:
        rank = durable_rank(store, tmp_path, "hangs", number=1)
        rank.save(1, persist=True)
        until(lambda: requests(tmp_path), "asked")
        pid = requests(tmp_path)[0]["pid"]
        failed = events.wait(PersistedEvent)
        assert not failed.ok
        assert "does not answer" in failed.why
        until(lambda: not Path(f"/proc/{pid}").exists(), "the hanging writer is gone")
        rank.wait("held", slots=[])


def test_close_does_not_wait_for_a_writer(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, _ = alone
    rank = durable_rank(store, tmp_path, "hangs")
    rank.save(1, persist=True)
    until(lambda: requests(tmp_path), "asked")
    pid = requests(tmp_path)[0]["pid"]
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 5
    until(lambda: not Path(f"/proc/{pid}").exists(), "the writer is gone")


def test_a_python_that_is_not_there_is_said(alone: tuple[Store, Events], tmp_path: Path) -> None:
    store, events = alone
    rank = FakeRank(store, 1, directory=str(tmp_path / "ckpt/x"), python="/no/python")
    rank.save(1, persist=True)
    assert "cannot start '/no/python'" in events.wait(PersistedEvent).why


def test_the_writer_finds_our_package_and_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site")
    monkeypatch.setenv("ROBUST_BEAT_DIR", "/run")
    monkeypatch.setenv("ROBUST_AUTO", "1")
    env = writer_environment()
    assert env["PYTHONPATH"] == f"{HOOK_DIR}{os.pathsep}/site"
    assert env["ROBUST_AUTO"] == "0"
    assert "ROBUST_BEAT_DIR" not in env


def test_a_writer_whose_start_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's file system stalls: the node's agent fell silent, and was lost for it."""
    begun, go_on = threading.Event(), threading.Event()

    def popen(*_: Any, **__: Any) -> Any:
        begun.set()
        go_on.wait(30)
        raise OSError("not started")

    monkeypatch.setattr(writing.subprocess, "Popen", popen)
    writer = writing.WriterProcess(["python3"])

    def start() -> None:
        with contextlib.suppress(writing.WriterError):
            writer.start()

    starting = threading.Thread(target=start)
    starting.start()
    assert begun.wait(10)

    def others() -> None:
        pids.append(writer.pid)
        writer.tell({"op": "nothing"})
        writer.close()
        pids.append(-1)

    pids: list[int] = []
    asking = threading.Thread(target=others)
    asking.start()
    asking.join(10)
    assert pids == [0, -1], "the pid, a message and the end do not wait for it"
    go_on.set()
    starting.join(10)
