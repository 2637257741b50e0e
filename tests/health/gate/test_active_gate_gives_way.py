"""Active tests give way to a job that comes while they run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import sweep_site
from fake_interpreter import FakeInterpreter
from gate_site import GateSite
from waiting import until

from health import node_claim
from health.gate import active_child
from health.gate.gate import Gate
from prolog.cli import main as prolog

site = sweep_site.site


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users"),
]


def test_the_prolog_ends_a_test(site: GateSite) -> None:
    python = FakeInterpreter(site)
    pid_of_child = site.path / "child"
    python.says(0, before=f"setsid sleep 60 & echo $! > {pid_of_child}; wait")
    site.environ(job=0)
    site.spool.mkdir()
    tested = site.path / "tested"

    def test() -> None:  # a process of its own, as the sweep is
        found = active_child.test(Gate("sweep", [], os.environ), "quick", True, monotonic() + 60)
        tested.write_text(found.result)

    sweeping = multiprocessing.get_context("fork").Process(target=test)
    sweeping.start()
    until(lambda: pid_of_child.exists() and pid_of_child.read_text() != "", "the test runs")
    site.environ(job=7)
    assert prolog([]) == 0
    assert state(int(pid_of_child.read_text())) == "gone", "also what left its session"
    sweeping.join(10)
    assert tested.read_text() == "owed"
    assert node_claim.give_way(str(site.spool)) == "", "the way is free"


def test_the_prolog_ends_a_test_that_root_started_where_no_interpreter_is_set(
    site: GateSite,
) -> None:
    """The test's process held the GPU, and the node was drained for it."""
    site.environ(job=7)
    site.spool.mkdir()
    begun = site.path / "begun"

    def by_hand() -> None:
        with node_claim.claimed(str(site.spool)):
            begun.touch()
            signal.pause()

    testing = multiprocessing.get_context("fork").Process(target=by_hand)
    testing.start()
    until(begun.exists, "the test runs")
    assert prolog([]) == 0
    testing.join(10)
    assert testing.exitcode not in (0, None)


@pytest.mark.parametrize("who", ["prolog", "test"])
def test_a_test_whose_gate_was_killed_is_ended(site: GateSite, who: str) -> None:
    """SIGKILL of the sweep frees its claim; the test, in a session of its own, lives on."""
    python = FakeInterpreter(site)
    noted = site.path / "noted"
    python.says(0, before=f"setsid sleep 60 & echo $$ $! > {noted}; wait")
    site.environ(job=0)
    site.spool.mkdir()

    def test() -> None:
        active_child.test(Gate("sweep", [], os.environ), "quick", True, monotonic() + 60)

    sweeping = multiprocessing.get_context("fork").Process(target=test)
    sweeping.start()
    until(lambda: noted.exists() and noted.read_text() != "", "the test runs")
    lock = site.spool / node_claim.LOCK
    until(lambda: lock.read_text() != "", "its note")
    assert sweeping.pid is not None
    os.kill(sweeping.pid, signal.SIGKILL)
    sweeping.join(10)
    pids = [int(word) for word in noted.read_text().split()]
    assert all(state(pid) not in ("gone", "Z") for pid in pids)
    if who == "prolog":
        site.environ(job=7)
        assert prolog([]) == 0
    else:
        python.passes()
        gate = Gate("sweep", [], os.environ)
        assert active_child.test(gate, "quick", True, monotonic() + 60).result == "passed"
        assert lock.read_text() == "", "nobody need look for what has ended"
    assert all(state(pid) in ("gone", "Z") for pid in pids), "also what left its session"


def test_a_note_of_another_process_ends_nobody(site: GateSite) -> None:
    site.spool.mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (site.spool / node_claim.LOCK).write_text(f"{other.pid} 1\n")
        assert node_claim.give_way(str(site.spool)) == ""
        assert other.poll() is None
        other.kill()


def test_giving_way_takes_of_the_prologs_time(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeInterpreter(site)
    given: list[float] = []
    check = Gate.check

    def noted(self: Gate, where: Any, deadline_s: float) -> Any:
        given.append(deadline_s)
        return check(self, where, deadline_s)

    def slow(spool: str) -> str:
        begun = monotonic()
        until(lambda: monotonic() > begun + 0.3, "a third of a second")
        return ""

    monkeypatch.setattr(Gate, "check", noted)
    monkeypatch.setattr(node_claim, "give_way", slow)
    site.environ(job=7)
    assert prolog([]) == 0
    assert 15.0 < given[0] < 19.8


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_the_way_is_free_where_nothing_ran(tmp_path: Path) -> None:
    assert node_claim.give_way(str(tmp_path / "nothing")) == ""
