"""Draining the own node: the breaker's limits, other reasons than ours, the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import breaker_site
import pytest
from breaker_site import MILD, REASON, BreakerSite
from fake_slurm import FakeSlurm
from fake_system import FakeSystem, context
from places import REPOSITORY

from health.gate import act
from health.gate.act import PLACES, DrainOutcome, drain_event, open_door
from health.gate.breaker import Drain
from health.gate.reserve import fleet_size, parse, refused_lately, reserve
from health.settings import defaults

own_path, patience, site = breaker_site.own_path, breaker_site.patience, breaker_site.site


def test_a_drain_is_reserved_and_placed(site: BreakerSite) -> None:
    assert site.drain() == DrainOutcome(drained=True)
    assert site.slurm.node()["reason"] == REASON
    assert site.slurm.drained == ["n1"]
    assert site.reserved() == ["n1"]


def test_an_administrators_reason_is_kept(site: BreakerSite) -> None:
    site.slurm.set(state="IDLE+DRAIN", reason="replace the fan")
    outcome = site.drain()
    assert outcome == DrainOutcome(kept="replace the fan")
    assert site.slurm.orders == [] and site.reserved() == []


def test_an_administrator_who_is_quicker_by_a_moment(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*args: Any) -> Any:
        decision = reserve(*args)
        site.slurm.set(state="IDLE+DRAIN", reason="replace the fan")
        return decision

    monkeypatch.setattr(act, "reserve", late)
    assert site.drain() == DrainOutcome(kept="replace the fan")
    assert site.slurm.node()["reason"] == "replace the fan"
    assert site.reserved() == []  # it did not count


def test_a_slurm_conf_that_does_not_answer_costs_the_reservation(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act, "LEDGER_S", 0.3)
    monkeypatch.setattr(act, "fleet_size", lambda system: time.sleep(60))
    began = time.monotonic()
    outcome = site.drain()
    assert outcome.drained and "no answer in 0.3 s" in outcome.note
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("old", "new", "wins"), [(MILD, REASON, REASON), (REASON, MILD, REASON)])
def test_of_our_own_reasons_the_harder_one_stands(
    site: BreakerSite, old: str, new: str, wins: str
) -> None:
    site.slurm.set(state="IDLE+DRAIN", reason=old)
    assert site.drain(reason=new) == DrainOutcome(drained=True, stood=wins == old)
    assert site.slurm.node()["reason"] == wins
    assert site.reserved() == []  # the node was out already


def test_a_person_who_edited_our_reason_owns_it(site: BreakerSite) -> None:
    edited = f"{REASON} ticket 4711"
    site.slurm.set(state="IDLE+DRAIN", reason=edited)
    assert site.drain().kept == edited


def test_the_breaker_holds(site: BreakerSite) -> None:
    for number in (1, 2):
        assert site.drain(f"n{number}", job=number).drained
    outcome = site.drain("n3", job=3)
    assert "2 other nodes were drained" in outcome.bound and "50 % of 4" in outcome.bound
    assert not outcome.drained and "NOT drained" in str(outcome)
    assert site.slurm.drained == ["n1", "n2"]
    assert site.drain("n2", job=9).drained  # out already


HARD = "robust:node:xid-79:gpu3:reboot:job0"
HUNG = "robust:node:mount-hung:/home:none:job0"


def test_a_dead_file_system_uses_up_nothing_that_broken_nodes_need(site: BreakerSite) -> None:
    one = {"max_nodes": 1.0, "max_percent": 100.0, "standing_percent": 50.0}
    assert site.drain("n1", job=0, reason=HUNG, **one).drained
    refused = site.drain("n2", job=0, reason=HUNG, **one)
    assert "1 other node was drained automatically for mounts in" in refused.bound
    assert site.drain("n2", job=0, reason=HARD, **one).drained
    assert site.drain("n3", job=0, reason=REASON, **one).drained, "a cause of its own"


def test_drains_that_stand_are_counted_whenever_they_were_made(site: BreakerSite) -> None:
    day = time.time() - 86400.0
    for name in ("n1", "n2"):
        site.slurm.set(name, state="IDLE+DRAIN", reason=HUNG, time=day)
    limits = {"max_nodes": 1.0, "max_percent": 100.0, "standing_percent": 50.0}
    outcome = site.drain("n3", job=0, reason=HUNG, **limits)
    assert outcome.bound == "2 other nodes stand drained automatically, the limit is 2 of 4"
    assert site.slurm.drained == ["n1", "n2"] and site.reserved() == []
    asked = len(site.slurm.calls)
    assert site.drain("n4", job=0, reason=HUNG, **limits).bound == outcome.bound
    assert len(site.slurm.calls) == asked + 1, "nobody asks for all nodes again at once"
    assert site.drain("n4", job=0, reason=HARD, **limits).drained


def test_drains_that_slurm_does_not_show_yet_count_as_standing(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_nodes": 4.0, "max_percent": 50.0, "standing_percent": 50.0}
    assert site.drain("n1", job=0, reason=HUNG, **limits).drained
    assert site.drain("n2", job=0, reason=REASON, **limits).drained
    for name in ("n1", "n2"):
        site.slurm.set(name, state="IDLE", reason="")
    assert "2 other nodes stand" in site.drain("n3", job=0, reason=HUNG, **limits).bound


def test_what_was_refused_is_kept_once(site: BreakerSite) -> None:
    one = {"max_nodes": 1.0, "max_percent": 100.0}
    assert site.drain("n1", job=0, reason=HUNG, **one).drained
    for _ in range(3):
        assert site.drain("n2", job=0, reason=HUNG, **one).bound
    (refused,) = refused_lately(str(site.state), time.time() - 60)
    assert (refused.node, refused.reason) == ("n2", HUNG)
    assert "the limit is 1" in refused.why
    assert refused_lately(str(site.state), time.time() + 60) == []
    assert site.reserved() == ["n1"]


def test_one_job_cannot_walk_through_the_cluster(site: BreakerSite) -> None:
    many = {"max_percent": 100.0}
    assert site.drain("n1", job=7, **many).drained
    assert site.drain("n2", job=7, **many).drained
    assert "for job 7" in site.drain("n3", job=7, **many).bound
    assert site.drain("n3", job=8, **many).drained


def test_gates_that_fail_at_once_reserve_one_after_another(site: BreakerSite) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from health.gate.reserve import reserve\n"
        "from health.gate.breaker import Drain, DrainLimits\n"
        "own = Drain(1000.0, sys.argv[2], 0)\n"
        "print(reserve(sys.argv[1], own, DrainLimits(3, 100.0, 60.0, 2), 0).allowed)\n"
    )
    here = [str(REPOSITORY)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(site.state), f"n{number}", *here],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in running]
    assert sorted(said) == ["False"] * 5 + ["True"] * 3
    assert len(site.reserved()) == 3


def test_the_fleet_is_what_slurm_conf_names(site: BreakerSite) -> None:
    text = "Include nodes.conf\nNodeName=DEFAULT CPUs=4\nNodeName=a[01-10],b State=UNKNOWN\n"
    files = {"/c/slurm.conf": text, "/c/nodes.conf": "NodeName=x[1-2]y[1-3] # more\nNodeName=a01\n"}
    known = context(SLURM_CONF="/c/slurm.conf")
    assert fleet_size(FakeSystem(files=dict(files), context=known)) == 17
    assert fleet_size(FakeSystem(context=known)) == 0
    broken = {"/c/slurm.conf": "NodeName=a[1-\n"}
    assert fleet_size(FakeSystem(files=dict(broken), context=known)) == 0


def test_records_that_are_none_are_left_out() -> None:
    one = Drain(1.0, "n1", 2)
    junk: list[dict[str, Any]] = [
        {},
        {"time": "1", "node": "n1", "job": 2},
        {"time": True, "node": "n1", "job": 2},
        {"time": float("inf"), "node": "n1", "job": 2},
        {"time": 1.0, "node": ["n1"], "job": 2},
        {"time": 1.0, "node": "n1", "job": None},
    ]
    assert parse([*junk, one._asdict()]) == [one]
    assert parse([one._asdict(), {**one._asdict(), "withdrawn": True}]) == []
    assert parse([{**one._asdict(), "withdrawn": True}, one._asdict()]) == [one]


def test_a_long_ledger_is_cut(site: BreakerSite, monkeypatch: pytest.MonkeyPatch) -> None:
    from health.gate import fleet_file
    from health.gate.breaker import DrainLimits

    monkeypatch.setattr(fleet_file, "LOOK_BACK", 2000)
    limits = DrainLimits(10**6, 100.0, 1.0, 10**6)
    for number in range(200):
        assert reserve(str(site.state), Drain(float(number), f"n{number}", 0), limits, 0).allowed
    assert (site.state / "nodes" / "drains.jsonl").stat().st_size < 5000
    assert site.reserved()[-1] == "n199"


def test_a_hostile_node_name_is_no_option(site: BreakerSite) -> None:
    assert site.drain("n1,n2").error
    assert site.slurm.drained == []


# -- around it --------------------------------------------------------------------------------


def test_the_event_says_what_is_needed_to_undo_it() -> None:
    system = FakeSystem(context=context(job=7, uid=1234))
    placed = drain_event(system, REASON, DrainOutcome(drained=True), "Xid 79, 1 x")
    assert placed.kind == "drain" and placed.boot == system.boot_id()
    wanted = {"reason": REASON, "job": 7, "uid": 1234, "action": "reboot", "placed": True}
    assert wanted.items() <= dict(placed.data).items()
    assert "as" not in placed.data
    left = drain_event(system, REASON, DrainOutcome(error="timeout"), "x", "Prolog error")
    assert left.data["as"] == "Prolog error" and left.data["placed"] is False


def test_the_failure_path_needs_the_standard_library_only(tmp_path: Path) -> None:
    """Start the gate like slurmd on a node: no site-packages, no PATH."""
    slurm = FakeSlurm(tmp_path, "n1")
    code = (
        f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]\n"
        "from health.gate.act import open_door\n"
        "from health.settings import defaults\n"
        "found = defaults(())\n"
        f"gate = {{**found.gate, 'slurm_bin': {str(slurm.bin)!r}}}\n"
        "door = open_door(found._replace(gate=gate))(20.0)\n"
        "print(door.drain('n1', 'robust:node:x:-:none:job1').done)\n"
        "print(door.undrain('n1').done)\n"
        "bad = {'ClusterShell', 'msgspec', 'asyncio', 'argparse', 'logging'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert not [name for name in sys.modules if 'pyslurm' in name]\n"
    )
    argv = ["/usr/bin/python3", "-IS", "-c", code]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_the_places_of_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    open_door(defaults(()))(1.0)
    assert os.environ["PATH"] == PLACES
