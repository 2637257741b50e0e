"""The sweep: what it drains, what it writes down, and that its own trouble closes nothing."""

from __future__ import annotations

import time

import pytest
import sweep_site
from gate_site import GateSite, finding

from health.history import events
from health.sweep import main

site = sweep_site.site


def test_all_well(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert site.slurm.drained == [] and site.slurm.orders == []
    assert [e.kind for e in site.events()] == ["boot", "pass"]
    main([])
    assert len(site.events("boot", "pass")) == 2  # once an hour is enough
    assert len(site.slurm.calls) == 2  # one look each
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_fault_drains(site: GateSite) -> None:
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:reboot:job0"
    assert site.event("drain")["where"] == "sweep"
    main([])
    assert len(site.events("drain")) == 1 and len(site.slurm.orders) == 1


def test_the_breaker_holds_here_too(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.settings("[breaker]\nmax_nodes = 0\n")
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.drained == []
    assert "circuit breaker" in capfd.readouterr().err


def test_a_fault_on_an_administrators_node(site: GateSite) -> None:
    site.slurm.set(state="IDLE+DRAIN", reason="replace the fan")
    site.find(finding())
    main([])
    assert site.slurm.node()["reason"] == "replace the fan" and site.slurm.orders == []


@pytest.mark.slow
def test_something_worse_takes_the_place_of_our_reason(site: GateSite) -> None:
    site.find(finding(action="none"))
    main([])
    site.find(finding(action="service"))
    main([])
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:service:job0"
    site.find(finding(action="none"))
    main([])
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:service:job0"


def test_without_slurm_it_only_writes_down(site: GateSite) -> None:
    site.slurm.die()
    site.find(finding())
    assert main([]) == 0
    assert site.event("run")["did"] == "Slurm did not answer"
    assert site.events("drain") == []


@pytest.mark.slow
def test_new_messages_of_the_driver_are_kept(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    from health.node.system import LogRecord
    from health.run import live

    text = "NVRM: Xid (PCI:0000:3b:00): 13, pid=5, name=python, Graphics Exception"
    monkeypatch.setattr(live.kmsg, "read", lambda *args: [LogRecord(1, 5.0, 4, text)])
    main([])
    main([])
    (xid,) = site.events("xid")
    assert (xid.data["code"], xid.data["gpu"]) == (13, "0000:3b:00.0")


def test_the_history_is_what_the_module_writes(site: GateSite) -> None:
    site.find(finding())
    main([])
    assert events.load(str(site.spool)) == site.shared()
    assert all(abs(e.time - time.time()) < 600 or e.kind == "boot" for e in site.events())


# -- itself ---------------------------------------------------------------------------------------


def test_its_own_bug_drains_nothing_and_is_said(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.break_with(KeyError("nobody thought of this"))
    assert main([]) == 0
    assert site.slurm.drained == []
    assert "KeyError" in capfd.readouterr().err
    assert "nobody thought" in site.event("crash")["error"]


def test_switched_off(site: GateSite) -> None:
    site.settings(gate="enabled = false")
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.calls == []


def test_called_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry"]) == 2
    assert "--dry" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "HealthCheckProgram" in capsys.readouterr().out
