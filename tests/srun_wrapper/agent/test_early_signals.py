"""Signals and shims that come when no rank is there for them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_job import Job
from slot_driver import Driver

from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.messages import Exited, Finish, Signal, Signalled, Started


@pytest.mark.parametrize(
    ("trap", "expected"),
    [("trap : USR1", True), ("trap '' USR1", True), ("trap : USR2", False), (":", False)],
)
def test_a_process_that_expects_a_signal(trap: str, expected: bool) -> None:
    script = f"{trap}; echo ready; read x; exit 0"
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert process_tree.expects(child.pid, signal.SIGUSR1) is expected
        child.communicate("\n")
    assert process_tree.expects(child.pid, signal.SIGUSR1) is False  # it is gone


def blocking(signals: str) -> str:
    return (
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, "
        f"{signals}); print('ready', flush=True); sys.stdin.read()"
    )


@pytest.mark.parametrize(
    ("signals", "expected"), [("{signal.SIGUSR1}", True), ("signal.valid_signals()", False)]
)
def test_a_blocked_signal(signals: str, expected: bool) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", blocking(signals)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert process_tree.expects(child.pid, signal.SIGUSR1) is expected


@pytest.mark.parametrize("before", [True, False], ids=["before its start", "after it"])
def test_an_early_signal_waits_until_the_rank_is_ready(tmp_path: Path, before: bool) -> None:
    script = "sleep 0.5; trap 'exit 7' USR1; while :; do sleep 0.02; done"
    with contextlib.closing(Driver(tmp_path, ["sh", "-c", script])) as slot:
        slot.order(Signal(signal.SIGUSR1, early=before))
        slot.start()
        slot.get(Started)
        if not before:
            slot.order(Signal(signal.SIGUSR1, early=True))
        ended = slot.get(Exited)
    assert (ended.code, ended.signal) == (7, None)


def test_signals_are_kept_until_an_epoch_begins() -> None:
    job = Job()  # in epoch 1
    job.say(0, Signalled(1, signal.SIGUSR2))
    assert not job.state.early
    job.state.members.stop_epoch()
    job.say(0, Signalled(2, signal.SIGUSR2))
    job.say(1, Signalled(1, signal.SIGUSR2))
    job.state.pass_on(signal.SIGUSR1)
    assert job.state.early == {signal.SIGUSR1, signal.SIGUSR2}
    assert not job.state.signalled


def test_a_signal_between_a_failure_and_its_recovery_is_kept() -> None:
    job = Job()
    job.say(1, Exited(1, 1, 0, 1, None, 0.0, ""))
    job.say(0, Signalled(1, signal.SIGHUP))
    assert job.state.early == {signal.SIGHUP}


def test_a_shim_that_comes_when_all_is_over_is_sent_away() -> None:
    job = Job(2, 0)
    job.state.ending = True
    assert job.join(2).sent[-1] == Finish(((0, 0), (0, 0)))


def test_a_shim_that_comes_back_is_told_its_own_end() -> None:
    job = Job(2, 0)
    job.node(0).order = Finish(((3, 0), (0, 9)))
    job.state.ending = True
    assert job.join(0, 1).sent[-1] == Finish(((3, 0), (0, 9)))
