"""The collector's process: not wanted, dying, hanging, slow, never ending."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from health.children import child
from health.node.gpu_snapshot import GpuSnapshot
from health.node.stuck import Stuck
from health.nvidia import nvml
from health.nvidia.nvml import Collector

pytestmark = pytest.mark.slow


def test_without_pynvml_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    assert Collector(20.0).wait()["error"] == "no-pynvml"


def test_where_no_gpu_is_wanted_nvml_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    snapshot = Collector(20.0, needed=lambda: False).wait()
    assert (snapshot["stage"], snapshot["error"], snapshot["devices"]) == ("done", "", [])
    assert Collector(20.0, needed=lambda: True).wait()["error"] == "no-pynvml"


def test_what_decides_whether_nvml_is_asked_may_hang_as_well() -> None:
    snapshot = Collector(3.0, needed=lambda: bool(time.sleep(3600))).wait()
    assert snapshot["hung"] and snapshot["stage"].startswith("slurm.conf (state S")


def _writes(*lines: object) -> Callable[[int, object], None]:
    def work(fd: int, needed: object) -> None:
        for line in lines:
            child.write_all(fd, json.dumps(line).encode() + b"\n")

    return work


def test_a_collector_that_dies_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fd: int, needed: object) -> None:
        _writes(["stage", "gpu0 ecc"])(fd, needed)
        os.kill(os.getpid(), 11)

    monkeypatch.setattr(nvml, "_collect", work)
    snapshot = Collector(20.0).wait()
    assert (snapshot["error"], snapshot["stage"], snapshot["hung"]) == (
        "died-signal-11",
        "gpu0 ecc",
        False,
    )


def test_a_collector_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_collect", _writes(["stage", "gpu0 ecc"]))
    assert Collector(20.0).wait()["error"] == "died-exit-0"


def test_answers_without_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fd: int, needed: object) -> None:
        while True:
            child.write_all(fd, b"x" * 65536)

    monkeypatch.setattr(nvml, "_collect", work)
    assert Collector(20.0).wait()["error"] == "too-many-answers"


def test_what_cannot_be_killed_is_remembered_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(fd: int, needed: object) -> None:
        _writes(["stage", "gpu3 ecc"])(fd, needed)
        time.sleep(60)

    stuck = Stuck(str(tmp_path / "stuck"))
    monkeypatch.setattr(nvml, "_collect", work)
    with monkeypatch.context() as held:
        held.setattr(child.Child, "stop", lambda self, grace_s=0.05: False)
        first = Collector(3.0, stuck)
        first.dies_s = 0.2
        pid = first._child.pid  # type: ignore[union-attr]
        snapshot: GpuSnapshot = first.wait()
    assert snapshot["hung"] and snapshot["stage"].startswith("gpu3 ecc (state S")
    assert snapshot["killed"] is False and snapshot["waited"] >= 1.0
    again = Collector(20.0, stuck)
    assert again.done and again.snapshot["hung"] and again.snapshot["killed"] is False
    assert again.snapshot["stage"].startswith("gpu3 ecc") and str(pid) in again.snapshot["stage"]
    assert first._child.stop(5.0)  # type: ignore[union-attr]
    monkeypatch.setattr(nvml, "_collect", _writes(["stage", "done"]))
    assert Collector(20.0, stuck).wait()["stage"] == "done"


@pytest.mark.parametrize("says", [False, True])
def test_what_dies_late_was_only_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: bool
) -> None:
    """The driver lets go of the killed process only when it has started the GPU."""

    def work(fd: int, needed: object) -> None:
        def meanwhile(*_: object) -> None:
            if says:
                _writes(["stage", "done"])(fd, needed)
            else:
                os.close(fd)  # as the kernel may, before it closes the driver's files

        signal.signal(signal.SIGUSR1, meanwhile)
        _writes(["stage", "init"])(fd, needed)
        time.sleep(60)

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        os.kill(self.pid, signal.SIGUSR1)
        threading.Timer(1.0, os.kill, (self.pid, 9)).start()
        return False

    stuck = Stuck(str(tmp_path / "stuck"))
    monkeypatch.setattr(nvml, "_collect", work)
    monkeypatch.setattr(child.Child, "stop", stop)
    collector = Collector(3.0, stuck)
    snapshot = collector.wait()
    assert (snapshot["hung"], snapshot["killed"]) == (True, True)
    assert snapshot["stage"].startswith("init (state S")
    assert stuck.still("nvml") == "" and snapshot["devices"] == []


def test_what_does_not_die_is_left_behind_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        pids.append(self.pid)
        return False

    monkeypatch.setattr(nvml, "_collect", lambda fd, needed: time.sleep(60))
    monkeypatch.setattr(child.Child, "stop", stop)
    collector = Collector(0.5)
    collector.limit = time.monotonic() + 1.0
    assert collector.wait()["killed"] is False
    assert time.monotonic() - collector.limit < 5  # and not dies_s later
    collector.close()
    other = Collector(60.0)
    other.close()  # the run is over before the deadline
    assert (other.done, other.snapshot["hung"], other.snapshot["killed"]) == (True, True, False)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
