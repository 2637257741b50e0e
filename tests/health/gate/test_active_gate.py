"""Active tests in prolog, epilog and sweep: with a fake interpreter that prints what it is told."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import sweep_site
from fake_interpreter import FakeInterpreter
from fake_python import fake_python
from gate_site import GONE, GateSite, finding

from epilog.cli import main as epilog
from health.gate import active_answer, active_child
from health.sweep import main as sweep
from prolog.cli import main as prolog

site = sweep_site.site


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users"),
]
REASON = "robust:node:active-gemm-wrong:gpu3:service:job"


def results(site: GateSite) -> list[tuple[str, str]]:
    return [(e.data["result"], e.data["why"]) for e in site.events("active-run")]


def test_a_node_that_nobody_reports_is_not_tested(site: GateSite) -> None:
    python = FakeInterpreter(site)
    site.environ(job=7)
    assert (prolog([]), epilog([]), sweep([])) == (0, 0, 0)
    assert python.asked == [] and results(site) == []


def test_a_reported_node_passes(site: GateSite) -> None:
    python = FakeInterpreter(site)
    site.environ(job=7)
    site.report_node()
    assert epilog([]) == 0
    (words,) = python.asked
    assert words.startswith("health.active.cli --json --level quick --node n1 --limit ")
    assert words.endswith(f" --config {site.toml}")
    assert site.event("accusation")["result"] == "cleared"
    assert results(site) == [("passed", "accusation")]
    site.environ(job=0)
    sweep([])
    assert len(python.asked) == 1, "nothing is owed"


def test_wrong_arithmetic_drains_with_the_evidence(site: GateSite) -> None:
    FakeInterpreter(site).fails()
    site.environ(job=7)
    site.report_node()
    assert epilog([]) == 0
    assert site.slurm.node()["reason"] == f"{REASON}7"
    assert "2 of 9 products differ" in site.event("drain")["evidence"]
    assert site.event("accusation")["result"] == "confirmed"


def test_the_kill_switch(site: GateSite) -> None:
    python = FakeInterpreter(site)
    python.fails()
    site.settings(f"[active]\npython = '{python.path}'\n", gate="disabled = ['active-gemm-wrong']")
    site.environ(job=7)
    site.report_node()
    epilog([])
    assert site.slurm.drained == []


@pytest.mark.parametrize("before", ["exit 3", "kill -SEGV $$", "echo junk"])
def test_an_epilog_without_an_answer_leaves_it_to_one_sweep(site: GateSite, before: str) -> None:
    python = FakeInterpreter(site)
    python.says(0, before=before)
    site.environ(job=7)
    site.report_node()
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
    site.report_node()
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
    site.report_node()
    site.slurm.die()
    epilog([])
    assert python.asked == [] and "Slurm did not report whether" in site.event("active-run")["told"]


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
    target = fake_python(place, python.script).parent / "python3.11"
    shutil.copy(os.path.realpath(sys.executable), target)
    target.chmod(0o777 if what == "program" else 0o755)
    if what == "directory":
        target.parent.chmod(0o775)
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
    site.report_node()
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
    assert "local, memory still to be run; passed: bitwise, gemm; skipped: memory: needs" in err
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


def test_after_a_report_what_ran_counts(site: GateSite) -> None:
    FakeInterpreter(site).says(0, ran=["gemm"], left="memory: needs 4 s")
    site.environ(job=7)
    site.report_node()
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
    tried = "(at most once an hour): the active tests ended with exit code 7"
    assert tried in capfd.readouterr().err
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
