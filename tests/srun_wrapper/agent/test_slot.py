"""One task slot with real processes. The slot runs in a process of its own (``_drive`` below),
because it ends everything beneath it; the test gives orders and reads events as JSON lines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import slot_driver

from robust_slurm.auto.snapshot_paths import TREE
from robust_slurm.record import BeatReader, record_path
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.end_report import ERROR_FILE, error_env
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import (
    Exited,
    Finish,
    Inspect,
    Inspected,
    Signal,
    Started,
    Stop,
    Stopped,
)

WRITE_ERROR = 'echo \'{"message": "ValueError: x"}\' > "$TORCHELASTIC_ERROR_FILE"'
IGNORES_TERM = "trap '' TERM; echo ready >&2; while :; do sleep 0.05; done"


drivers, drive = slot_driver.drivers, slot_driver.drive


def test_a_rank_runs_with_its_environment(drive: Any) -> None:
    d = drive("sh", "-c", 'echo "$RANK $ROBUST_EPOCH $ROBUST_BEAT_DIR"; env | grep -c STEP_KEY')
    started = d.launch(epoch=3, rank=5)
    assert (started.epoch, started.local) == (3, 0)
    exited = d.get(Exited)
    assert (exited.epoch, exited.local, exited.code, exited.launched) == (3, 0, 1, True)
    d.wait(lambda: "0\n" in d.stdout())
    assert d.stdout() == f"5 3 {d.base}\n0\n"


def test_its_beat_record_is_made(drive: Any) -> None:
    code = "import robust_slurm, sys; robust_slurm.beat(41, loss=0.5); sys.exit(7)"
    d = drive(sys.executable, "-c", code)
    d.start(epoch=2, rank=4)
    assert d.get(Exited).code == 7
    beat = BeatReader(record_path(str(d.base), 2, 0)).read()
    assert beat is not None
    assert (beat.step, beat.epoch, beat.rank, beat.source) == (41, 2, 4, "explicit")


def test_a_snapshot_of_the_code_that_is_not_on_the_node_is_named(
    drive: Any, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    d = drive("sh", "-c", "exit 3")
    d.start(code=Code("c-1", "/proj", store, f"{store}/c-1", "", ("sh", "-c", "exit 3"), {}))
    exited = d.get(Exited)
    assert (exited.code, exited.launched) == (2, False)
    assert "the snapshot of the code is not on this node; is code_store" in exited.tail
    assert f"{store}/c-1" in exited.tail


def test_a_job_that_a_rank_has_submitted_does_not_look_for_the_code_of_that_rank(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job inherits the rank's environment; the snapshot is pruned some day."""
    monkeypatch.setenv(TREE, str(tmp_path / "gone"))
    d = drive("sh", "-c", f'exit "${{{TREE}:-4}}"')
    d.start()
    exited = d.get(Exited)
    assert (exited.code, exited.launched) == (4, True)


def test_a_snapshot_whose_file_system_is_mounted_a_moment_later_is_waited_for(
    drive: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    d = drive("sh", "-c", "exit 3")
    timer = threading.Timer(0.5, (store / "c-1").mkdir, kwargs={"parents": True})
    timer.start()
    d.start(code=Code("c-1", "/proj", str(store), f"{store}/c-1", "", ("sh", "-c", "exit 3"), {}))
    exited = d.get(Exited)
    timer.join()
    assert (exited.code, exited.launched) == (3, True)


@pytest.mark.parametrize(
    ("script", "code", "signum"),
    [
        ("exit 0", 0, None),
        ("exit 3", 3, None),
        ("kill -9 $$", None, 9),
        ("kill -11 $$", None, 11),
        ("exit 139", 139, None),
    ],
)
def test_how_it_ended(drive: Any, script: str, code: int | None, signum: int | None) -> None:
    d = drive("sh", "-c", script)
    d.start()
    exited = d.get(Exited)
    assert (exited.code, exited.signal) == (code, signum)


def test_the_tail_of_stderr_is_kept_and_carried(drive: Any) -> None:
    d = drive("sh", "-c", "seq 1 3000 >&2; echo 'ValueError: last words' >&2; exit 1")
    d.start()
    exited = d.get(Exited)
    assert exited.tail.endswith("3000\nValueError: last words\n")
    assert len(exited.tail) <= 4096
    d.wait_stderr("last words\n")
    assert d.stderr().startswith("1\n2\n3\n")


def test_the_nodes_facts_go_with_the_end(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch's error file, which no other rank of the slot finds again."""
    monkeypatch.delenv(ERROR_FILE, raising=False)
    d = drive("sh", "-c", f'[ "$ROBUST_EPOCH" = 2 ] || {WRITE_ERROR}; exit 1')
    for epoch, facts in ((1, ("ValueError: x",)), (2, ()), (3, ("ValueError: x",))):
        d.start(epoch)
        exited = d.get(Exited)
        assert (exited.epoch, exited.code, exited.facts) == (epoch, 1, facts)


def test_the_users_own_error_file_is_left_alone(
    drive: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    monkeypatch.setenv(ERROR_FILE, str(own))
    d = drive("sh", "-c", f"{WRITE_ERROR}; exit 1")
    d.start()
    assert d.get(Exited).facts == () and own.exists()


def test_torchrun_has_error_files_of_its_own() -> None:
    file = Path("/run/error-0.json")
    assert error_env({}, ["torchrun", "train.py"], file) == {}
    assert error_env({ERROR_FILE: "x"}, ["python", "train.py"], file) == {}
    assert error_env({}, ["python", "train.py"], file) == {ERROR_FILE: str(file)}


@pytest.mark.parametrize(
    ("command", "code"), [("no-such-command-anywhere", 2), ("/etc/passwd", 13), ("/", 13)]
)
def test_a_command_that_cannot_run(drive: Any, command: str, code: int) -> None:
    """The exit codes are srun's."""
    d = drive(command)
    d.start()
    exited = d.get(Exited)
    assert (exited.code, exited.launched) == (code, False)
    assert f"cannot run '{command}'" in exited.tail
    d.wait_stderr(f"robust-task: cannot run '{command}': ")
    d.order(Stop(1, 0.1))  # and the shim goes on
    d.get(Stopped)


def test_a_rank_that_leaves_on_sigterm_has_its_time(drive: Any) -> None:
    d = drive("sh", "-c", "trap 'echo bye >&2; exit 0' TERM; echo ready >&2; sleep 60 & wait")
    d.launch()
    d.wait_stderr("ready")
    d.order(Stop(1, 10.0))
    stopped = d.get(Stopped)
    assert (stopped.epoch, stopped.stuck) == (1, ())
    assert d.below() == []
    d.wait_stderr("bye")
    assert not [e for e in d.events if isinstance(e, Exited)]  # an end on order is no event


def test_a_rank_that_ignores_sigterm_is_killed(drive: Any) -> None:
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch()
    d.wait_stderr("ready")
    began = time.monotonic()
    d.order(Stop(1, 0.3))
    d.get(Stopped)
    assert 0.25 < time.monotonic() - began < 5.0
    assert d.below() == []


def test_no_grace_is_no_ceremony(drive: Any) -> None:
    d = drive("sh", "-c", "trap 'echo told >&2' TERM; echo ready >&2; while :; do sleep 0.05; done")
    d.launch()
    d.wait_stderr("ready")
    d.order(Stop(1, 0.0))
    d.get(Stopped)
    assert d.below() == [] and "told" not in d.stderr()


@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_grandchildren_in_their_own_session_end_too(drive: Any, grace: float) -> None:
    d = drive("sh", "-c", "setsid sh -c 'sleep 60 & sleep 60' & echo ready >&2; wait")
    d.launch()
    d.wait_stderr("ready")
    d.wait(lambda: len(d.below()) >= 4)
    d.order(Stop(1, grace))
    d.get(Stopped)
    assert d.below() == []


def test_what_a_crashed_rank_left_is_ended(drive: Any) -> None:
    d = drive("sh", "-c", "setsid sleep 60 & sleep 60 & exit 5")
    d.start()
    assert d.get(Exited).code == 5
    d.wait(lambda: d.below() == [])


def test_a_stopped_rank_ends(drive: Any) -> None:
    # No loop of a shell: stopped between vfork and exec, its child would keep it in state D.
    d = drive("sh", "-c", "echo ready >&2; exec sleep 60")
    started = d.launch()
    d.wait_stderr("ready")
    os.killpg(started.pid, signal.SIGSTOP)
    d.wait(lambda: process_tree.usage([started.pid]).state == "T")
    d.order(Stop(1, 5.0))
    d.get(Stopped)
    assert d.below() == []


def test_a_restart_leaves_nothing_of_the_last_epoch(drive: Any) -> None:
    d = drive("sh", "-c", "setsid sleep 60 & echo epoch $ROBUST_EPOCH >&2; sleep 60")
    first = d.launch(epoch=1)
    d.wait_stderr("epoch 1")
    d.wait(lambda: len(d.below()) == 3)
    before = set(d.below())
    second = d.launch(epoch=2)
    d.wait_stderr("epoch 2")
    d.wait(lambda: len(d.below()) == 3)
    assert not before & set(d.below())
    assert first.pid != second.pid and second.epoch == 2
    kinds = [type(e).__name__ for e in d.events]
    assert kinds == ["SlotHello", "Stopped", "Started", "Stopped", "Started"]


def test_only_the_newest_start_counts(drive: Any) -> None:
    """A second failure during a recovery: the orders overtake the ending of the ranks."""
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch(epoch=1)
    d.wait_stderr("ready")
    d.start(epoch=2, grace=10.0)
    d.start(epoch=3, grace=0.5)
    assert d.get(Started).epoch == 3
    d.order(Stop(3, 0.0))
    d.get(Stopped)
    assert [e.epoch for e in d.events if isinstance(e, Started)] == [1, 3]


def test_a_stop_during_the_ending_keeps_the_next_from_starting(drive: Any) -> None:
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch(epoch=1)
    d.wait_stderr("ready")
    d.start(epoch=2, grace=30.0)
    d.order(Stop(1, 0.1))  # and the shorter grace wins
    d.get(Stopped, seconds=8.0)
    d.order(Inspect(5, 0.05))
    d.get(Inspected)
    assert d.below() == []
    assert [e.epoch for e in d.events if isinstance(e, Started)] == [1]


def test_a_slot_without_a_rank_only_stops(drive: Any) -> None:
    d = drive("sleep", "60")
    d.start(local=1)
    d.get(Stopped)
    d.order(Inspect(1, 0.05))
    sample = d.get(Inspected).samples[0]
    assert (sample.state, d.below()) == ("", [])


def test_signals_reach_the_whole_group(drive: Any) -> None:
    script = (
        "trap 'echo usr2 >&2' USR2; (trap 'echo too >&2' USR2; echo r >&2; sleep 9 & wait; wait)&"
    )
    d = drive("sh", "-c", script + "echo ready >&2; wait; wait")
    d.launch()
    d.wait_stderr("ready")
    d.wait_stderr("r\n")
    d.order(Signal(signal.SIGUSR2))
    d.wait_stderr("usr2")
    d.wait_stderr("too")


@pytest.mark.parametrize("inherit", [True, False])
def test_signals_reach_the_rank(drive: Any, inherit: bool) -> None:
    script = "trap 'echo told >&2; exit 4' USR1; echo ready >&2; while :; do sleep 0.05; done"
    d = drive("sh", "-c", script, inherit=inherit)
    d.launch()
    d.wait_stderr("ready")
    d.order(Signal(signal.SIGUSR1))
    assert d.get(Exited).code == 4


@pytest.mark.parametrize("inherit", [True, False])
def test_the_rank_dies_with_its_shim(drive: Any, inherit: bool) -> None:
    d = drive("sh", "-c", "exec sleep 60", inherit=inherit)
    rank = d.launch().pid
    d.process.kill()
    d.process.wait(10)
    d.wait(lambda: process_tree.usage([rank]).state in ("", "Z"))


def test_an_inspection_sees_what_the_rank_does(drive: Any) -> None:
    d = drive("sh", "-c", "echo ready >&2; exec sleep 60")
    started = d.launch()
    d.wait_stderr("ready")
    comm = Path(f"/proc/{started.pid}/comm")
    d.wait(lambda: comm.read_text() == "sleep\n" and process_tree.usage([started.pid]).state == "S")
    d.order(Inspect(3, 0.1))
    asleep = d.get(Inspected)
    assert (asleep.token, asleep.samples[0].local, asleep.samples[0].state) == (3, 0, "S")
    os.kill(started.pid, signal.SIGSTOP)
    d.wait(lambda: process_tree.usage([started.pid]).state == "T")
    d.order(Inspect(4, 0.1))
    assert d.get(Inspected).samples[0].state == "T"


def test_finish_gives_this_slots_exit(drive: Any) -> None:
    d = drive("sh", "-c", "exit 3")
    d.start()
    d.get(Exited)
    d.order(Finish(((3, 0), (0, 9))))
    assert d.process.wait(10) == 3


def test_output_files_and_labels_are_the_ranks(drive: Any) -> None:
    plan = {"label": True, "out": "{dir}/o-%t"}
    d = drive("sh", "-c", "echo out; echo err >&2; sleep 60", output=plan)
    d.launch(rank=1)
    path = d.base / "o-1"
    d.wait(lambda: path.exists() and path.read_text() == "1: out\n")
    d.wait_stderr("1: err\n")
    d.launch(epoch=2, rank=1)
    d.wait(lambda: path.read_text() == "1: out\n" * 2)  # a restart goes on in the same file


def test_an_output_file_that_cannot_be_made(drive: Any) -> None:
    d = drive("echo", "x", output={"out": "/proc/nowhere/o-%t"})
    d.start()
    exited = d.get(Exited)
    assert not exited.launched and "/proc/nowhere/o-0" in exited.tail


def test_steps_are_seen_in_the_output(drive: Any) -> None:
    script = "for i in 5 6 7; do echo step $i; done; exit 1"
    d = drive("sh", "-c", script, regex=r"step (\d+)")
    d.start()
    d.get(Exited)
    reader = BeatReader(record_path(str(d.base), 1, 0))
    d.wait(lambda: (b := reader.read()) is not None and b.beats == 3)
    beat = reader.read()
    assert beat is not None and (beat.step, beat.source) == (7, "regex")
    d.wait(lambda: d.stdout() == "step 5\nstep 6\nstep 7\n")
