"""Active tests in prolog, epilog and sweep: with a fake interpreter that prints what it is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import sweep_site
from gate_site import GONE, GateSite, finding
from waiting import until

from epilog.cli import main as epilog
from health.gate import active_answer, active_child
from health.gate.active_answer import applying
from health.gate.gate import Gate
from health.sweep import main as sweep
from prolog.cli import main as prolog

site = sweep_site.site
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users"),
]
ALL = sorted(applying(gpus=False))
WRONG = {
    "status": "FAIL", "class": "node", "check": "active-gemm-wrong", "device": "gpu3",
    "evidence": "2 of 9 products differ", "action": "service",
}  # fmt: skip
REASON = "robust:node:active-gemm-wrong:gpu3:service:job"


class FakeInterpreter:
    """Says what it was called with, prints an answer, and ends with its code."""

    def __init__(self, site: GateSite, undrain: str = "never", more: str = "") -> None:
        self.path, self.log = site.path / "python", site.path / "asked"
        self.passes()
        site.settings(f"[active]\npython = '{self.path}'\nundrain = '{undrain}'\n{more}")

    def says(
        self, code: int, *rows: Any, before: str = "", ran: Sequence[str] = ALL, left: str = ""
    ) -> None:
        answer = json.dumps(
            {
                "findings": {"n1": rows},
                "cleared": [] if rows else ["n1"],
                "measured": [{"test": name} for name in ran],
                "left_out": [left] if left else [],
            }
        )
        text = f"#!/bin/sh\necho \"$@\" >> {self.log}\n{before}\necho '{answer}'\nexit {code}\n"
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(self.path)

    def passes(self) -> None:
        self.says(0)

    def fails(self) -> None:
        self.says(1, WRONG)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def results(site: GateSite) -> list[tuple[str, str]]:
    return [(e.data["result"], e.data["why"]) for e in site.events("active-run")]


def test_a_node_that_nobody_accuses_is_not_tested(site: GateSite) -> None:
    python = FakeInterpreter(site)
    site.environ(job=7)
    assert (prolog([]), epilog([]), sweep([])) == (0, 0, 0)
    assert python.asked == [] and results(site) == []


def test_an_accused_node_passes(site: GateSite) -> None:
    python = FakeInterpreter(site)
    site.environ(job=7)
    site.accuse()
    assert epilog([]) == 0
    (words,) = python.asked
    assert words.startswith(
        "-I -m robust_slurm.commands health.active.cli --json --level quick --node n1 --limit "
    )
    assert words.endswith(f" --config {site.toml}")
    assert site.event("accusation")["result"] == "cleared"
    assert results(site) == [("passed", "accusation")]
    site.environ(job=0)
    sweep([])
    assert len(python.asked) == 1, "nothing is owed"


def test_wrong_arithmetic_drains_with_the_evidence(site: GateSite) -> None:
    FakeInterpreter(site).fails()
    site.environ(job=7)
    site.accuse()
    assert epilog([]) == 0
    assert site.slurm.node()["reason"] == f"{REASON}7"
    assert "2 of 9 products differ" in site.event("drain")["evidence"]
    assert site.event("accusation")["result"] == "confirmed"


def test_the_kill_switch(site: GateSite) -> None:
    python = FakeInterpreter(site)
    python.fails()
    site.settings(f"[active]\npython = '{python.path}'\n", gate="disabled = ['active-gemm-wrong']")
    site.environ(job=7)
    site.accuse()
    epilog([])
    assert site.slurm.drained == []


@pytest.mark.parametrize("before", ["exit 3", "kill -SEGV $$", "echo junk"])
def test_an_epilog_without_an_answer_leaves_it_to_one_sweep(site: GateSite, before: str) -> None:
    python = FakeInterpreter(site)
    python.says(0, before=before)
    site.environ(job=7)
    site.accuse()
    assert epilog([]) == 0
    assert site.slurm.drained == [] and results(site)[-1][0] == "owed"
    site.environ(job=0)
    for _ in range(2):
        sweep([])
    assert len(python.asked) == 2
    assert [result for result, _ in results(site)] == ["owed", "broken"]


def test_what_is_owed_is_done_when_the_node_is_free(site: GateSite) -> None:
    python = FakeInterpreter(site)
    python.fails()
    step = site.path / "n1_9.0"
    step.touch()
    site.environ(job=7)
    site.accuse()
    epilog([])
    site.environ(job=0)
    sweep([])
    step.unlink()
    site.slurm.set(state="ALLOCATED")  # a job has it that has no step yet
    sweep([])
    assert python.asked == [] and results(site) == [("owed", "accusation")]
    site.slurm.set(state="IDLE")
    sweep([])
    assert site.slurm.node()["reason"] == f"{REASON}0"


def test_without_slurms_word_nothing_is_started(site: GateSite) -> None:
    python = FakeInterpreter(site)
    site.environ(job=7)
    site.accuse()
    site.slurm.die()
    epilog([])
    assert python.asked == [] and "Slurm does not say" in site.event("active-run")["told"]


@pytest.mark.parametrize(
    ("setting", "status", "asked"),
    [("true", "139", 1), ("true", "256", 0), ("false", "139", 0)],
)
def test_suspicious_ends(site: GateSite, setting: str, status: str, asked: int) -> None:
    python = FakeInterpreter(site, more=f"suspicious = {setting}\n")
    site.environ(job=7, SLURM_JOB_EXIT_CODE=status)
    epilog([])
    assert len(python.asked) == asked
    if asked:
        assert results(site) == [("passed", "a job ended by SIGSEGV")]


@pytest.mark.parametrize("what", ["program", "directory", "owner", "missing"])
def test_an_interpreter_that_others_can_change_is_not_run(site: GateSite, what: str) -> None:
    python = FakeInterpreter(site)
    place = site.path / "venv"
    place.mkdir(mode=0o755)
    target = place / "python"
    target.write_bytes(python.path.read_bytes())
    target.chmod(0o777 if what == "program" else 0o755)
    if what == "directory":
        place.chmod(0o775)
    elif what == "owner":
        os.chown(target, GONE, GONE)
    elif what == "missing":
        target.unlink()
    link = site.path / "linked"
    link.symlink_to(target)
    for path in (target, link):
        assert active_child.distrusted(str(path), 10.0)
    site.settings(f"[active]\npython = '{link}'\n")
    site.environ(job=7)
    site.accuse()
    assert epilog([]) == 0
    assert python.asked == [] and "is not used" in site.event("active-run")["told"]


# -- before a node comes back -------------------------------------------------------------------


def drained(site: GateSite, undrain: str = "quick") -> FakeInterpreter:
    python = FakeInterpreter(site, undrain)
    site.find(finding(action="none"))
    sweep([])
    assert site.slurm.drained == ["n1"] and python.asked == []
    site.find()
    return python


def test_it_comes_back_when_it_passes(site: GateSite) -> None:
    python = drained(site)
    sweep([])
    assert site.slurm.drained == [] and len(python.asked) == 1
    assert results(site) == [("passed", "undrain")]


def test_it_is_tested_once_a_drain(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    from health.sweep import Sweep

    python = drained(site)
    with monkeypatch.context() as patch:  # Slurm answered the test, and then no more
        patch.setattr(Sweep, "_undrain", lambda self, reason: "not undrained: timeout")
        sweep([])
    assert site.slurm.drained == ["n1"]
    sweep([])
    assert site.slurm.drained == [] and len(python.asked) == 1


def test_a_node_that_fails_is_drained_harder(site: GateSite) -> None:
    python = drained(site)
    python.fails()
    sweep([])
    assert site.slurm.node()["reason"] == f"{REASON}0"
    python.passes()
    sweep([])
    assert site.slurm.drained == ["n1"], "now a person has to say that it was repaired"
    assert len(python.asked) == 1


def test_half_of_the_tests_are_no_proof_and_the_others_follow(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    python = drained(site)
    python.says(0, ran=["bitwise", "gemm"], left="memory: needs 4 s, and of 9 s 1 are left")
    sweep([])
    assert site.slurm.drained == ["n1"] and results(site) == [("partly", "undrain")]
    err = capfd.readouterr().err
    assert "local, memory still to be run; passed: bitwise, gemm; left out: memory: needs" in err
    python.says(0, ran=["local", "memory"])
    sweep([])
    assert site.slurm.drained == [] and len(python.asked) == 2
    assert python.asked[1].endswith(" local memory")


def test_what_is_left_out_every_time_keeps_it_drained(site: GateSite) -> None:
    python = drained(site)
    python.says(0, ran=["gemm"])
    for _ in range(3):
        sweep([])
    assert site.slurm.drained == ["n1"] and len(python.asked) == 2
    assert [result for result, _ in results(site)] == ["partly", "broken"]


def test_after_an_accusation_what_ran_counts(site: GateSite) -> None:
    FakeInterpreter(site).says(0, ran=["gemm"], left="memory: needs 4 s")
    site.environ(job=7)
    site.accuse()
    epilog([])
    assert results(site) == [("passed", "accusation")] and site.slurm.drained == []


def test_a_node_that_cannot_be_tested_stays_and_is_tried_once_in_an_hour(
    site: GateSite, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = drained(site)
    python.says(3, before="exit 7")
    sweep([])
    assert site.slurm.node()["reason"].startswith("robust:node:broken:")
    assert "stays drained: the active tests: " in capfd.readouterr().err
    python.passes()
    sweep([])
    assert site.slurm.drained == ["n1"] and len(python.asked) == 1
    assert "once in an hour: the active tests ended with exit code 7" in capfd.readouterr().err
    monkeypatch.setattr(active_answer, "RETRY_S", 0.0)
    sweep([])
    assert site.slurm.drained == []


def test_a_level_without_an_interpreter_keeps_it_drained(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    drained(site)
    site.settings("[active]\nundrain = 'quick'\n")
    sweep([])
    assert site.slurm.drained == ["n1"] and "[active] python is not" in capfd.readouterr().err


# -- a job comes meanwhile ----------------------------------------------------------------------


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
    assert active_child.give_way(str(site.spool)) == "", "the way is free"


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
    lock = site.spool / active_child.LOCK
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
        (site.spool / active_child.LOCK).write_text(f"{other.pid} 1\n")
        assert active_child.give_way(str(site.spool)) == ""
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
    monkeypatch.setattr(active_child, "give_way", slow)
    site.environ(job=7)
    assert prolog([]) == 0
    assert 15.0 < given[0] < 19.8


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_the_way_is_free_where_nothing_ran(tmp_path: Path) -> None:
    assert active_child.give_way(str(tmp_path / "nothing")) == ""
