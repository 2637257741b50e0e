"""Accusations that came after the job's epilog: the sweep follows them up."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import sweep_site
from gate_site import GONE, GateSite

from health.checks import ALL
from health.gate.gate import Gate
from health.gate.inquiry import acquitted
from health.history import events as history
from health.node.system import Event
from health.run.live import LiveSystem
from health.settings import defaults
from health.sweep import main

pytestmark = pytest.mark.slow

site = sweep_site.site

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@needs_root
def test_a_report_that_came_after_the_epilog(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    site.report_node(rule="node-lost")
    site.environ(job=0)
    main([])
    main([])
    event = site.event("accusation")
    assert (event["result"], event["rule"], event["name"]) == ("cleared", "node-lost", "n1.e3.json")
    assert "tested" not in event, "the site has no tests of its own"
    assert site.event("strike")["uid"] == GONE


@needs_root
def test_of_a_job_that_was_not_here_nothing_is_read(site: GateSite) -> None:
    site.report_node()
    main([])
    assert site.events("accusation", "rejected") == []


@needs_root
def test_a_late_forged_one_is_refused(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    os.chown(site.report_node(), 666, 666)
    site.environ(job=0)
    main([])
    assert site.event("rejected")["owner"] == 666
    assert site.events("strike") == []


@needs_root
@pytest.mark.parametrize("closed", ["8", "8/accusations"])
def test_a_directory_that_its_user_has_closed_is_that_jobs_alone(
    site: GateSite, closed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sweep's search ended there, and the reports of all older jobs were never read."""
    from epilog.cli import main as epilog

    for job, uid in ((7, GONE), (8, GONE + 1)):
        site.environ(job=job, uid=uid)
        epilog([])
        site.report_node(job=job, uid=uid)
    (site.state / "jobs" / closed).chmod(0)
    site.environ(job=0)
    main([])
    assert [e.data["job"] for e in site.events("accusation")] == [7]
    (rejected,) = site.events("rejected")
    assert (rejected.data["job"], rejected.data["owner"]) == (8, GONE + 1)
    assert "rejected report accusations in job 8" in capfd.readouterr().err
    main([])
    assert len(site.events("rejected")) == 1, "once"


@needs_root
@pytest.mark.parametrize("answers", [True, False])
def test_only_a_file_system_that_is_silent_ends_the_search(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A user's directory that never answers costs that user's reports."""
    from epilog.cli import main as epilog
    from health.gate import inquiry
    from health.history import node_reports

    for job, uid in ((7, GONE), (8, GONE + 1), (9, GONE + 1)):
        site.environ(job=job, uid=uid)
        epilog([])
        site.report_node(job=job, uid=uid)
    found, real = node_reports._found, os.access

    def hangs(state_dir: str, node: str, reporting: Any, known: Any) -> Any:
        if reporting.uid == GONE + 1:
            threading.Event().wait()
        return found(state_dir, node, reporting, known)

    def access(path: Any, mode: int) -> bool:
        if str(path).endswith("/jobs") and not answers:
            threading.Event().wait()
        return real(path, mode)

    monkeypatch.setattr(node_reports, "_found", hangs)
    monkeypatch.setattr(inquiry, "FIND_S", 0.3)
    monkeypatch.setattr(os, "access", access)
    site.environ(job=0)
    main([])
    assert [e.data["job"] for e in site.events("accusation")] == ([7] if answers else [])


@needs_root
def test_a_drain_that_rests_on_a_withdrawn_report_is_lifted(site: GateSite) -> None:
    from epilog.cli import main as epilog

    for job, uid in ((1, GONE), (2, GONE), (3, GONE + 1)):
        site.environ(job=job, uid=uid)
        site.report_node(job=job, uid=uid)
        epilog([])
    assert site.slurm.node()["reason"] == "robust:node:lemon:-:service:job3"
    assert site.event("drain")["reports"] == [{"job": 3, "name": "n1.e3.json"}]
    site.environ(job=0)
    main([])
    assert site.slurm.drained == ["n1"]
    site.report_node(job=3, uid=GONE + 1, name="n1.e3.withdrawn.json", withdrawn="on n1 and s1")
    main([])
    assert site.event("withdrawn")["why"] == "on n1 and s1"
    assert site.slurm.drained == []
    site.environ(job=4, uid=GONE + 1)  # the strikes that stand count on
    site.report_node(job=4, uid=GONE + 1)
    epilog([])
    assert site.slurm.node()["reason"] == "robust:node:lemon:-:service:job4"


@needs_root
def test_a_withdrawal_that_is_found_with_a_new_report_counts_for_it(site: GateSite) -> None:
    """The strike that it takes back made a lemon of the node, which no later sweep undrained."""
    from epilog.cli import main as epilog

    for job, uid in ((1, GONE), (2, GONE), (3, GONE + 1)):
        site.environ(job=job, uid=uid)
        if job < 3:
            site.report_node(job=job, uid=uid)
        epilog([])
    site.environ(job=0)
    site.report_node(job=1, uid=GONE, name="n1.e3.withdrawn.json", withdrawn="on n1 and s1")
    site.report_node(job=3, uid=GONE + 1)
    main([])
    assert len(site.events("strike")) == 3 and site.event("withdrawn")["why"] == "on n1 and s1"
    assert site.slurm.drained == []


@needs_root
def test_a_withdrawal_waits_for_a_history_that_cannot_be_read(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    site.report_node()
    epilog([])
    assert site.events("strike")
    site.environ(job=0)
    site.report_node(name="n1.e3.withdrawn.json", withdrawn="on n1 and s1")
    with monkeypatch.context() as broken:

        def history(_system: LiveSystem) -> list[Event]:
            raise OSError(errno.EIO, "Input/output error", "history.jsonl")

        broken.setattr(LiveSystem, "history", history)
        main([])
    assert "no history to count strikes in" in capfd.readouterr().err
    assert site.events("withdrawn") == []
    main([])
    assert site.event("withdrawn")["why"] == "on n1 and s1"


@needs_root
@pytest.mark.parametrize("broken", ["record", "check"])
@pytest.mark.parametrize("gate", ["epilog", "sweep"])
def test_a_report_whose_outcome_was_not_recorded_is_looked_at_again(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, gate: str, broken: str
) -> None:
    """The node's disk is full for a moment, or a check breaks the gate."""
    from epilog.cli import main as epilog

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    site.environ(job=7)
    if gate == "sweep":
        epilog([])
        site.environ(job=0)
    site.report_node()
    with monkeypatch.context() as patch:
        if broken == "record":
            patch.setattr(history, "append", full)
        else:
            patch.setattr(Gate, "check", full)
        (epilog if gate == "epilog" else main)([])
    assert not site.events("accusation", "strike")
    site.environ(job=0)
    main([])
    assert site.event("accusation")["result"] == "cleared" and site.event("strike")
    main([])
    assert len(site.events("accusation", "strike")) == 2


def test_strikes_that_grow_old_acquit_nobody() -> None:
    day = 86400.0
    strikes = [
        Event(at * day, "strike", "", {"job": n, "uid": n, "account": str(n), "name": f"n1.{n}"})
        for n, at in enumerate((1.0, 2.0, 27.0), 1)
    ]
    drained, settings = 27.5 * day, defaults(ALL)

    def withdrawn(job: int, name: str, at: float) -> bool:
        word = Event(at * day, "withdrawn", "", {"job": job, "name": name})
        return acquitted([*strikes, word], settings, drained)

    assert not withdrawn(9, "n1.9", 27.6)  # about nothing that anybody had said
    assert not withdrawn(3, "n1.other", 40.0)
    assert not withdrawn(3, "n1.3", 27.0)  # before the drain
    assert withdrawn(3, "n1.3", 27.6)


@needs_root
def test_what_is_withdrawn_at_once_is_no_strike(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    site.report_node()
    site.report_node(name="n1.e3.withdrawn.json", withdrawn="on n1 and s1")
    epilog([])
    site.environ(job=0)
    main([])
    assert site.events("accusation", "strike", "rejected", "withdrawn") == []


@needs_root
def test_a_job_cannot_fill_the_history_with_withdrawals(site: GateSite) -> None:
    """Withdrawals are kept for good, and push out what is older."""
    from epilog.cli import main as epilog

    site.environ(job=7)
    for number in range(8):
        name = f"n1.w{number}.withdrawn.json"
        site.report_node(name=name, incident=f"w{number}", withdrawn="x" * 300)
    epilog([])
    assert site.events("withdrawn") == []
