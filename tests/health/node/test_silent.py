"""Calls on a file system that does not answer: one process is lost, and one is told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from health.children import call
from health.node import silent
from health.node.silent import AGAIN, call_on, first_silence
from health.node.stuck import Stuck


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the gate, which knows of nothing yet."""
    monkeypatch.setattr(silent, "_told", {})


def test_no_second_call_is_made_in_a_run(run: None, tmp_path: Path) -> None:
    made = tmp_path / "made"
    stuck = Stuck(str(tmp_path / "stuck"))
    assert call_on(str(tmp_path), lambda: time.sleep(60), 0.2, stuck=stuck)[1].startswith(
        "no answer"
    )
    assert first_silence(str(tmp_path)).startswith("no answer")
    assert call_on(str(tmp_path), made.touch, 5.0, stuck=stuck) == (None, AGAIN)
    assert not made.exists()
    assert call_on("/proc", lambda: 7, 20.0, stuck=stuck) == (7, "")  # another one answers


def test_a_process_that_stays_is_remembered_over_runs(
    run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck").mkdir()
    stuck = Stuck(str(tmp_path / "stuck"))
    lost = subprocess.Popen(["sleep", "60"])  # in place of one that no signal ends
    stuck.remember(f"probe {tmp_path}", lost.pid, "no answer")
    try:
        assert call_on(str(tmp_path), lambda: 7, 20.0, stuck=stuck) == (None, AGAIN)
        assert first_silence(str(tmp_path)) == ""  # the run before has told of it
    finally:
        os.kill(lost.pid, signal.SIGKILL)
        lost.wait()
    assert call_on(str(tmp_path), lambda: 7, 20.0, stuck=stuck) == (7, "")


def test_a_silent_file_system_is_told_of_once_over_runs(
    run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that wait for it can be killed, as on a hard NFS mount: nothing is left of them."""
    where, stuck = str(tmp_path), Stuck(str(tmp_path / "stuck"))
    made = tmp_path / "made"

    def dead(path: str) -> None:
        time.sleep(60)

    call_on(where, lambda: time.sleep(60), 0.2, stuck=stuck)
    assert first_silence(where).startswith("no answer")
    for since in (0.0, 700.0):  # after some minutes the look is a long one, once
        monkeypatch.setattr(silent, "_told", {})
        monkeypatch.setattr(silent, "_LOOK_S", 0.7)
        monkeypatch.setattr(silent, "_BRIEFLY_S", 600.0 - since)
        with monkeypatch.context() as within:
            within.setattr(os, "statvfs", dead)
            assert call_on(where, made.touch, 20.0, stuck=stuck) == (None, AGAIN)
        assert first_silence(where) == "" and not made.exists()
    monkeypatch.setattr(silent, "_told", {})
    for name in ("_BRIEF_S", "_LOOK_S"):  # a busy machine forks late
        monkeypatch.setattr(silent, name, 20.0)
    assert call_on(where, lambda: 7, 20.0, stuck=stuck) == (7, "")  # it answers again
    call_on(where, lambda: time.sleep(60), 0.2, stuck=stuck)
    assert first_silence(where).startswith("no answer")


def test_who_cannot_be_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(call.Child, "stop", lambda self: False)
    error = call.call_in_child(lambda: time.sleep(60), 0.2, lambda *one: told.append(one))[1]
    [(pid, why)] = told
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert error.startswith("no answer") and why.startswith("no answer in 0.2 s, state")


def test_one_users_directory_silences_nothing_else(run: None, tmp_path: Path) -> None:
    stuck = Stuck(str(tmp_path / "stuck"))
    call_on(str(tmp_path), lambda: time.sleep(60), 0.2, "reports of job 7", stuck)
    assert call_on(str(tmp_path), lambda: 7, 20.0, "reports of job 8", stuck) == (7, "")
    assert call_on(str(tmp_path), lambda: 7, 20.0, "reports of job 7", stuck) == (None, AGAIN)
    assert first_silence(str(tmp_path)) == ""
