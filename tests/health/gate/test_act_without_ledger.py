"""Draining the own node where the ledger or Slurm does not answer."""

from __future__ import annotations

import time
from typing import Any

import breaker_site
import pytest
from breaker_site import ELSEWHERE, REASON, BreakerSite
from fake_system import FakeSystem, context

from health.gate import act, slurms_records
from health.gate.act import Drainer
from health.gate.breaker import Drain, DrainLimits
from health.node import rootfiles
from robust_slurm.slurm import SlurmError

HARD = "robust:node:xid-79:gpu3:reboot:job0"
CRASH = "robust:tool:gate-crashed:-:none:job0"
own_path, patience, site = breaker_site.own_path, breaker_site.patience, breaker_site.site


def test_slurms_own_records_stand_in_for_the_ledger(site: BreakerSite) -> None:
    outcome = site.drain(ledger=False)
    assert outcome.drained and outcome.note == "no state_dir is set"
    assert len(site.pauses) == 2 and site.pauses[0] <= 2.0 and site.pauses[1] == 1.0
    shows = [call for call in site.slurm.calls if call[-1] == "node"]
    assert len(shows) == 2  # before and after


def test_a_dead_ledger_is_as_none(site: BreakerSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(act, "LEDGER_S", 1.5)
    held = rootfiles.lock(rootfiles.open_dir(str(site.state / "nodes")), "drains.lock")
    assert held
    outcome = site.drain()
    assert outcome.drained and "no answer in 1.5 s" in outcome.note
    counted = "drained (limits counted in Slurm's own records: no shared ledger: no answer in 1.5 s"
    assert str(outcome).startswith(counted)


def test_a_ledger_of_somebody_else_is_as_none(site: BreakerSite) -> None:
    (site.state / "nodes").chmod(0o777)
    outcome = site.drain()
    assert outcome.drained and "can be written by others" in outcome.note


def test_the_breaker_counts_drains_that_slurm_shows(site: BreakerSite) -> None:
    site.slurm.set("n2", state="IDLE+DRAIN", reason=ELSEWHERE)
    site.slurm.set("n3", state="IDLE+DRAIN", reason="by hand")
    assert site.drain("n1", ledger=False).drained
    outcome = site.drain("n4", job=9, ledger=False)
    assert "2 other nodes" in outcome.bound and site.slurm.node("n4")["state"] == "IDLE"
    site.slurm.set("n2", state="IDLE+DRAIN", reason=ELSEWHERE, time=time.time() - 7200)
    refused = site.drain("n4", job=9, ledger=False)  # out of the window, and still there
    assert "2 other nodes stand drained automatically, the limit is 2 of 4" in refused.bound
    assert site.drain("n4", job=9, ledger=False, standing_percent=100.0).drained


def test_what_users_left_elsewhere_does_not_use_up_the_limit(site: BreakerSite) -> None:
    for name in ("n2", "n3"):
        site.slurm.set(name, state="IDLE+DRAIN", reason="robust:user:disk-full:/tmp:none:job1")
    assert site.drain("n1", ledger=False).drained


def test_one_drain_too_many_is_taken_back(site: BreakerSite) -> None:
    """Another gate looked at the same moment and drained first."""
    real = site.pauses.append

    def meanwhile(seconds: float) -> None:
        real(seconds)
        site.slurm.set("n2", state="IDLE+DRAIN", reason=ELSEWHERE, time=time.time() - 5)

    known = context(node="n1", job=7)
    settings = site.settings(False, max_nodes=1)
    drainer = Drainer(settings, FakeSystem(context=known), time.monotonic() + 20, pause=meanwhile)
    outcome = drainer.drain(REASON)
    assert "the limit is 1" in outcome.bound
    assert site.slurm.drained == ["n2"]


def test_a_dead_slurm_is_said_and_counts(site: BreakerSite) -> None:
    site.slurm.die()
    outcome = site.drain()
    assert not outcome.drained and not outcome.bound and "unreachable" in outcome.error
    assert site.reserved() == ["n1"]  # Slurm will drain it: the gate ends with 1


def test_the_breaker_holds_without_slurm_too(site: BreakerSite) -> None:
    for number in (1, 2):
        assert site.drain(f"n{number}", job=number).drained
    site.slurm.die()
    assert "2 other nodes" in site.drain("n3", job=3).bound


def test_without_anything_its_own_memory_counts(site: BreakerSite) -> None:
    site.slurm.die()
    assert site.drain(ledger=False, reason=HARD).error
    assert site.drain(ledger=False, reason=HARD, max_nodes=0).bound


def test_what_nobody_counts_closes_only_on_hard_evidence(site: BreakerSite) -> None:
    """A dead file server may keep all nodes from the ledger, and slurmctld from answering."""
    site.slurm.die()
    for reason in (REASON, "robust:node:mount-hung:/home:none:job0", CRASH):
        assert "no shared ledger, and Slurm" in site.drain(ledger=False, reason=reason).bound


def test_it_keeps_its_time(site: BreakerSite) -> None:
    site.slurm.die(60.0)
    began = time.monotonic()
    outcome = site.drain(seconds=3.0)
    assert time.monotonic() - began < 20
    # On a loaded machine the ledger, too, may not answer in its part of the time.
    assert not outcome.drained and "timeout" in outcome.error + outcome.bound


def test_no_scontrol_at_all(site: BreakerSite) -> None:
    (site.slurm.bin / "scontrol").unlink()
    outcome = site.drain()
    assert outcome.error or outcome.kept or outcome.bound  # never a silent success
    assert not outcome.drained


def test_a_node_that_slurm_does_not_know(site: BreakerSite) -> None:
    assert "has no node n9" in site.drain("n9").error


def test_without_a_reservation_it_gives_way_to_later_drains(site: BreakerSite) -> None:
    """Later drains may have a reservation, and their gates do not look again."""

    def meanwhile(seconds: float) -> None:
        if "n1" in site.slurm.drained:
            site.slurm.set("n2", state="IDLE+DRAIN", reason=ELSEWHERE, time=time.time() + 5)

    site.pause = meanwhile
    assert "the limit is 1" in site.drain(ledger=False, max_nodes=1).bound
    assert site.slurm.drained == ["n2"]


def test_with_the_ledger_slurms_records_count_too(site: BreakerSite) -> None:
    site.slurm.set("n2", state="IDLE+DRAIN", reason=ELSEWHERE)  # made without a reservation
    assert "the limit is 1" in site.drain(max_nodes=1).bound
    assert site.slurm.drained == ["n2"] and site.reserved() == []


def test_a_gate_that_was_slow_looks_again(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act, "TICK_S", 0.0)
    site.pause = lambda seconds: site.slurm.set(
        "n2", state="IDLE+DRAIN", reason=ELSEWHERE, time=time.time() - 5
    )
    assert "the limit is 1" in site.drain(max_nodes=1).bound
    assert site.slurm.drained == ["n2"] and site.reserved() == []


def test_a_drain_that_could_not_be_taken_back_is_not_made(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurms_records, "TICK_S", 30.0)
    assert "no time to count by Slurm's records" in site.drain(ledger=False).bound
    assert site.slurm.orders == []


def test_a_slurm_that_refuses_at_once_is_not_asked_all_the_time() -> None:
    pauses: list[float] = []

    def door() -> Any:
        raise SlurmError("unreachable", ["scontrol"], "Connection refused")

    own = Drain(time.time(), "n1", 7, "network")
    rest = lambda: 10.0 - sum(pauses)  # noqa: E731
    records = slurms_records.SlurmsRecords(
        own, DrainLimits(3, 100.0, 60.0, 2), door, pauses.append, rest
    )
    assert records.take_back(REASON, "one too many") == ""
    assert len(pauses) == 39 and set(pauses) == {slurms_records.AGAIN_S}
