"""Ranks that are ended in stages, with real processes; NCCL is a stub (fake_nccl_rank.py)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from places import PROGRAMS

from srun_wrapper.agent.processes.stop_stages import ABORTING, longest
from srun_wrapper.protocol.messages import Stop, Stopped

pytestmark = pytest.mark.slow

drivers, drive = slot_driver.drivers, slot_driver.drive
FAKE_NCCL = PROGRAMS / "fake_nccl_rank.py"
SAVES = """
import signal, sys, time
def save(number, frame):
    with open(sys.argv[1], "wb", 0) as file:
        for _ in range(30):
            file.write(b"x" * 1001)
            time.sleep(0.1)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", file=sys.stderr, flush=True)
while True:
    time.sleep(0.02)
"""


def stopped(drive: Any, *command: str, grace: float = 0.2, **options: Any) -> Stopped:
    d = drive(*command, **options)
    d.launch()
    d.wait_stderr("ready")
    d.order(Stop(1, grace))
    told: Stopped = d.get(Stopped, 30.0)
    assert told.stuck == () and d.below() == []
    return told


def test_a_rank_that_saves_on_sigterm_has_the_time_it_needs(drive: Any, tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    told = stopped(drive, sys.executable, "-c", SAVES, str(file))
    assert file.stat().st_size == 30 * 1001
    assert told.cut == () and told.stages["term"] > 2.0


def test_it_is_told_which_file_was_cut_off(drive: Any, tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    told = stopped(drive, sys.executable, "-c", SAVES, str(file), work_limit=0.5)
    assert file.stat().st_size < 30 * 1001
    (text,) = told.cut
    assert text.startswith("rank 0 was killed while it was still writing ") and str(file) in text


@pytest.mark.parametrize("busy", ["pass", "time.sleep(0.1)"])
def test_a_handler_that_writes_nothing_has_no_more_than_the_grace(drive: Any, busy: str) -> None:
    """A rank in a hung collective may spin."""
    handler = f"def save(number, frame):\n    while True:\n        {busy}\n"
    program = "import signal, sys, time\n" + handler + SAVES.partition("    sys.exit(0)\n")[2]
    began = time.monotonic()
    told = stopped(drive, sys.executable, "-c", program)
    assert time.monotonic() - began < 15.0 and told.cut == ()
    assert told.stages["term"] < 5.0


def aborted(
    drive: Any, tmp_path: Path, *words: str, grace: float = 0.2
) -> tuple[Stopped, list[str]]:
    log = tmp_path / "log"
    told = stopped(drive, sys.executable, str(FAKE_NCCL), str(log), *words, grace=grace)
    return told, log.read_text().splitlines() if log.exists() else []


GROUP = ["group start", "abort", "abort", "group end"]


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_communicators_are_aborted_before_the_rank_dies(
    drive: Any, tmp_path: Path, grace: float
) -> None:
    told, log = aborted(drive, tmp_path, grace=grace)
    assert log == GROUP
    assert ("late_abort" if grace == 0 else "abort") in told.stages


def test_a_handler_of_sigterm_runs_before_the_abort(drive: Any, tmp_path: Path) -> None:
    """The handler must not save the result of an aborted collective."""
    told, log = aborted(drive, tmp_path, "handler")
    assert log == ["SIGTERM", *GROUP]
    assert list(told.stages)[:2] == ["term", "late_abort"]


def test_an_abort_that_hangs_is_not_waited_for(drive: Any, tmp_path: Path) -> None:
    told, log = aborted(drive, tmp_path, "stuck")
    assert log == ["group start", "abort"]
    assert told.stages["abort"] >= ABORTING


def test_nothing_to_abort_takes_no_time(drive: Any, tmp_path: Path) -> None:
    told, log = aborted(drive, tmp_path, "gloo")
    assert log == [] and "abort" not in told.stages and "late_abort" not in told.stages


def test_the_longest_of_each_stage() -> None:
    assert longest([]) == {}
    assert longest([{"kill": 1.0}, {"term": 2.0, "kill": 0.5}]) == {"term": 2.0, "kill": 1.0}
