"""The time that a drain is held down, and drains that become ones for service."""

from __future__ import annotations

import json
import time

import pytest
import sweep_site
from gate_site import GateSite, finding
from hypothesis import given
from hypothesis import strategies as st

from health import cli
from health.gate.drain_times import lines
from health.gate.holds import DAY, HoldRules, drains, held_until, service
from health.node.system import Event
from health.sweep import main
from robust_slurm.drain_reason import parse_reason

pytestmark = pytest.mark.slow

NOW = 1_000_000.0
H = 3600.0
HUNG = "robust:node:mount-hung:/x:none:job0"


def drain(ago: float, reason: str = HUNG) -> Event:
    return Event(NOW - ago, "drain", "b", {"reason": reason})


def burn_in(ago: float, ok: bool) -> Event:
    return Event(NOW - ago, "burn-in", "b", {"ok": ok, "result": "passed" if ok else "failed"})


REPAIRED = Event(NOW - 2 * H, "repaired", "b", {})


@pytest.mark.parametrize(
    ("before", "hold"),
    [
        ([], 600.0),
        ([drain(H)], 1200.0),
        ([drain(H), drain(2 * H)], 2400.0),
        ([drain(number * H) for number in range(1, 20)], DAY),  # never longer
        ([drain(25 * H)], 600.0),  # a day ago
        ([drain(H, "robust:node:disk-full:/tmp:none:job3")], 600.0),  # another finding
        ([drain(H, "robust:node:mount-hung:/y:none:job3")], 1200.0),  # another path
        ([drain(H, "Prolog error")], 600.0),
        ([drain(3 * H), REPAIRED], 600.0),  # a person mended it
        ([drain(3 * H), REPAIRED, drain(H)], 1200.0),
        ([drain(3 * H), burn_in(2 * H, True)], 600.0),
        ([drain(3 * H), burn_in(2 * H, False)], 1200.0),
    ],
)
def test_the_hold_doubles_with_each_drain(before: list[Event], hold: float) -> None:
    reason = parse_reason(HUNG)
    assert reason is not None
    own = drain(0.0)
    assert held_until(reason, own, [*before, own], HoldRules()) == NOW + hold


def test_records_of_one_drain_count_once() -> None:
    """The prologs of jobs that start together may each drain before they see the other's drain."""
    reason = parse_reason(HUNG)
    undrained = Event(NOW - 0.1, "undrain", "b", {"reason": HUNG})
    together = [drain(2 * H), drain(2 * H - 1), drain(0.2)]
    assert reason is not None
    assert len(drains("mount-hung", together, NOW)) == 2
    assert service(reason, together, NOW, HoldRules()) == "", "it is the second"
    assert held_until(reason, drain(0.0), together, HoldRules()) == NOW + 1200.0
    assert "3 drains" in service(reason, [*together, undrained], NOW, HoldRules())


@pytest.mark.parametrize("action", ["reset-gpu", "reboot", "service"])
def test_what_has_a_proof_of_its_own_is_not_held(action: str) -> None:
    reason = parse_reason(HUNG.replace("none", action))
    assert reason is not None
    assert held_until(reason, drain(0.0), [drain(H), drain(0.0)], HoldRules()) == 0.0
    assert service(reason, [drain(H), drain(2 * H)], NOW, HoldRules()) == ""


@pytest.mark.parametrize(
    ("reason", "before", "rules", "why"),
    [
        (HUNG, [], HoldRules(), ""),
        (HUNG, [drain(H)], HoldRules(), ""),
        (HUNG, [drain(H), drain(23 * H)], HoldRules(), "3 drains for mount-hung within 24 h"),
        (HUNG, [drain(H), drain(25 * H)], HoldRules(), ""),
        (HUNG, [drain(H), drain(3 * H), REPAIRED], HoldRules(), ""),
        (HUNG, [drain(H)], HoldRules(hold_times=2), "2 drains for mount-hung within 24 h"),
        (HUNG, [drain(H), drain(2 * H)], HoldRules(hold_times=0), ""),
        ("robust:user:disk-full:/tmp:none:job1", [drain(H), drain(2 * H)], HoldRules(), ""),
        ("Prolog error", [drain(H), drain(2 * H)], HoldRules(), ""),
    ],
)
def test_the_third_time_in_a_day_means_service(
    reason: str, before: list[Event], rules: HoldRules, why: str
) -> None:
    assert service(parse_reason(reason), before, NOW, rules) == why


@pytest.mark.parametrize("cls", ["user", "tool"])
def test_what_is_not_the_nodes_is_held_but_wants_nobody(cls: str) -> None:
    text = f"robust:{cls}:disk-full:/tmp:none:job1"
    reason = parse_reason(text)
    before = [drain(H, text), drain(2 * H, text), drain(3 * H, text)]
    assert reason is not None
    assert service(reason, before, NOW, HoldRules()) == ""
    assert held_until(reason, drain(0.0, text), before, HoldRules()) == NOW + 4800.0


@given(st.lists(st.floats(0.0, 3 * DAY), max_size=200))
def test_a_day_never_has_more_drains_than_the_limit(times: list[float]) -> None:
    """A fault that comes whenever the node is in service; nobody repairs it."""
    reason = parse_reason(HUNG)
    assert reason is not None
    made: list[Event] = []
    free = 0.0  # when the node is back
    for now in sorted(times):
        if now < free:
            continue
        why = service(reason, made, now, HoldRules())
        made.append(Event(now, "drain", "b", {"reason": HUNG}))
        free = float("inf") if why else held_until(reason, made[-1], made, HoldRules())
        assert len(drains("mount-hung", made, now)) <= HoldRules().hold_times


site = sweep_site.site


def flap(site: GateSite) -> None:
    site.find(finding(action="none"))
    main([])
    site.find()
    main([])


def test_a_node_that_flaps_ends_in_service(
    site: GateSite, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        flap(site)
        assert site.slurm.drained == []
    flap(site)
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:service:job0"
    told = "drained as robust:node:broken:gpu3:service:job0: 3 drains for broken within 24 h"
    assert told in capfd.readouterr().err
    main([])
    assert site.slurm.drained == ["n1"]
    last = site.events("drain")[-1].data
    assert (last["action"], last["base"]) == ("service", "none")
    site.remember("burn-in", ok=True)
    main([])
    assert site.slurm.drained == [], "a burn-in proved it to be well"
    flap(site)
    assert site.slurm.drained == [], "and counting began anew"


@pytest.mark.parametrize("check", ["mount-hung", "mounts-hung", "site-check"])
def test_a_shared_service_that_flaps_puts_no_node_into_service(site: GateSite, check: str) -> None:
    for _ in range(4):
        site.find(finding(check=check, action="none"))
        main([])
        assert site.slurm.node()["reason"] == f"robust:node:{check}:gpu3:none:job0"
        site.find()
        main([])
        assert site.slurm.drained == []


def test_a_drain_is_held_down(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.settings("[breaker]\nhold_down = 600\n")
    flap(site)
    assert site.slurm.drained == ["n1"]
    assert "stays drained: held down until " in capfd.readouterr().err
    path = site.spool / "history.jsonl"
    moved = path.read_text().replace(
        f'"time":{site.events("drain")[0].time}', f'"time":{site.events("drain")[0].time - 601}'
    )
    path.write_text(moved)
    site.slurm.set(time=site.slurm.node()["time"] - 601)
    main([])
    assert site.slurm.drained == []


def test_a_persons_word_ends_the_hold(site: GateSite) -> None:
    site.settings("[breaker]\nhold_down = 600\n")
    flap(site)
    site.remember("repaired")
    main([])
    assert site.slurm.drained == []


def test_status_names_what_keeps_a_drain() -> None:
    undrained = Event(NOW - 3 * H, "undrain", "b", {"reason": HUNG})
    service_ = Event(
        NOW - 60, "drain", "b", {"reason": HUNG.replace("none", "service"), "base": "none"}
    )
    reboot = drain(30.0, "robust:node:xid-79:gpu0:reboot:job0")
    shown = lines("n1", [drain(4 * H), undrained, drain(90.0), service_, reboot], NOW, HoldRules())
    assert "; undrained " in shown[0]
    assert "drain 2 for mount-hung within 24 h: held down until " in shown[1]
    assert shown[2].endswith(
        "within 24 h: until `robust-health repaired`, or a burn-in that passes"
    )
    assert shown[3].endswith(
        "drain 1 for xid-79 within 24 h: until the checks pass and the action (reboot) is confirmed"
    )
    assert lines("n1", [drain(25 * H)], NOW, HoldRules()) == [
        "n1: not drained by robust-slurm within 24 h"
    ]


def test_the_status_command(site: GateSite, capsys: pytest.CaptureFixture[str]) -> None:
    site.settings("[breaker]\nhold_down = 600\nmax_nodes = 1\n")
    flap(site)
    refused = {"time": time.time(), "node": "n2", "job": 0, "cause": "mounts"}
    refused |= {"refused": "1 other nodes", "reason": HUNG}
    with (site.state / "nodes" / "drains.jsonl").open("a") as file:
        file.write(json.dumps(refused) + "\n")
    assert cli.main(["status", "--config", str(site.toml), "--node", "n1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("n1: ") and "held down until" in first
    assert second == f"n2: NOT drained, {HUNG}: 1 other nodes"
