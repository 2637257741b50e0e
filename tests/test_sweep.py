"""The sweep: what it drains, what alone it takes back, what it never touches."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_system import BOOT
from gate_site import GONE, GateSite, finding

from health import cli, gate, history, settings
from health.finding import LADDER, ActionName
from health.sweep import copy_fleet, main
from health.system import Event
from health.undrain import HARMLESS, NEAR_S, Standing, ours, why_not
from prolog.cli import main as prolog

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
NOW = 2_000_000.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateSite:
    made = GateSite(tmp_path, monkeypatch)
    made.environ(job=0)
    return made


# -- pure: whose a drain is, and whether it may be taken back ---------------------------------


def reason(action: str = "reboot", check: str = "xid-79", device: str = "gpu3") -> str:
    return f"robust:node:{check}:{device}:{action}:job7"


def drained(action: str = "reboot", at: float = NOW - 1000, boot: str = BOOT, **more: Any) -> Event:
    return Event(at, "drain", boot, {"reason": reason(action), "job": 7, "uid": 1000, **more})


def standing(text: str, at: float | None = NOW - 1000, *flags: str) -> Standing:
    return Standing({"IDLE", "DRAIN", *flags}, text, at)


@pytest.mark.parametrize(
    ("text", "events", "is_ours"),
    [
        (reason(), [drained()], True),
        (reason(), [], True),  # the record is lost; the prefix and the grammar are ours
        ("replace the fan", [drained()], False),
        (f"{reason()} ticket 4711", [drained()], False),  # edited by a person
        ("robust:node:node-lost:-:none:job7", [], True),  # robust-srun's, with drain = "direct"
        ("robust: node:crash: job7:e1", [], False),  # not our grammar
        ("robust:", [], False),
        ("", [drained()], False),
        ("Prolog error", [], False),  # another site script's
        ("Prolog error", [drained()], False),  # ours was placed: this is another one
        ("Prolog error", [drained(**{"as": "Prolog error", "placed": False})], True),
        ("Epilog error", [drained(**{"as": "Prolog error", "placed": False})], False),
        ("Prolog error", [drained(at=NOW - 9000, **{"as": "Prolog error"})], False),
        ("Prolog error", [drained(**{"as": "Prolog error", "reason": "junk"})], False),
        (f"{reason()} : reboot issued", [drained(at=NOW - 9000)], True),  # Slurm's own addition
        (f"{reason()} : reboot whenever", [], False),
        (
            "Prolog error : reboot issued",
            [drained(at=NOW - 9000, **{"as": "Prolog error", "placed": False})],
            True,
        ),
        ("Not responding", [], False),
        ("Kill task failed", [], False),
    ],
)
def test_whose_a_drain_is(text: str, events: list[Event], is_ours: bool) -> None:
    assert bool(ours(standing(text), events)) == is_ours


def test_a_node_that_is_not_drained_has_no_drain_of_ours() -> None:
    assert ours(Standing({"IDLE"}, reason(), NOW), [drained()]) is None


def test_of_several_records_the_one_of_this_drain_counts() -> None:
    old = drained(at=NOW - 90_000, boot="old")
    mine = ours(standing(reason()), [old])
    assert mine and mine.event.time == NOW - 1000 and mine.event.boot == ""
    near = drained(at=NOW - 1000 + NEAR_S / 2)
    mine = ours(standing(reason()), [old, near])
    assert mine and mine.event == near


def test_the_record_of_a_drain_is_older_than_slurms_reboot() -> None:
    drain = drained(at=NOW - 90_000, boot="old")
    mine = ours(standing(f"{reason()} : reboot issued : reboot complete"), [drain])
    assert mine and mine.event == drain


_BOOTED = NOW - 50_000  # before the drain


@pytest.mark.parametrize(
    ("action", "booted", "after", "free"),
    [
        ("none", _BOOTED, [], True),
        ("clear-leftovers", _BOOTED, [], True),
        ("restart-fabric-manager", _BOOTED, [], True),
        ("reset-gpu", _BOOTED, [], False),
        ("reset-gpu", _BOOTED, [("reset", "0000:3b:00.0")], True),
        ("reset-gpu", _BOOTED, [("reset", "")], True),
        ("reset-gpu", _BOOTED, [("reset", "0000:99:00.0")], False),
        ("reset-gpu", _BOOTED, [("driver", "")], True),
        ("reset-gpu", NOW - 10, [], True),
        ("reboot", _BOOTED, [], False),
        ("reboot", _BOOTED, [("reset", "")], False),
        ("reboot", NOW - 10, [], True),
        ("service", _BOOTED, [], False),
        ("service", NOW - 10, [("reset", "")], False),
        ("service", NOW - 10, [("repaired", "")], True),
    ],
)
def test_the_proof_that_an_action_demands(
    action: ActionName, booted: float, after: list[tuple[str, str]], free: bool
) -> None:
    first = drained(action, boot=BOOT if booted < NOW - 1000 else "older")
    events = [first, *(Event(NOW - 5, kind, BOOT, {"gpu": gpu}) for kind, gpu in after)]
    stands = standing(reason(action))
    mine = ours(stands, events)
    assert mine is not None
    why = why_not(stands, mine, events, BOOT, booted, {"gpu3": "0000:3b:00.0"})
    assert (why == "") == free, why


@pytest.mark.parametrize(
    "flag",
    ["DOWN", "FAIL", "MAINTENANCE", "REBOOT_ISSUED", "REBOOT_REQUESTED", "NOT_RESPONDING",
     "POWERED_DOWN", "POWERING_UP", "INVALID_REG", "FUTURE", "UNKNOWN", "BLOCKED", "NEW_FLAG"],
)  # fmt: skip
def test_no_node_with_another_flag(flag: str) -> None:
    stands = standing(reason("none"), NOW - 1000, flag)
    mine = ours(stands, [])
    assert mine is not None
    assert flag in why_not(stands, mine, [], BOOT, _BOOTED, {})
    assert flag not in HARMLESS


# -- drains -----------------------------------------------------------------------------------


def test_all_well(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert site.slurm.drained == [] and site.slurm.orders == []
    assert [e.kind for e in site.events()] == ["boot"]
    main([])
    assert len(site.events("boot")) == 1
    assert len(site.slurm.calls) == 2  # one look each
    assert capfd.readouterr() == ("", "")


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


# -- undrains ---------------------------------------------------------------------------------


def test_what_passes_again_comes_back(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.find(finding(action="none"))
    main([])
    site.find()
    assert main([]) == 0
    assert site.slurm.drained == []
    assert site.event("undrain")["reason"] == "robust:node:broken:gpu3:none:job0"
    assert len(site.shared("drain", "undrain")) == 2
    assert "undrained" in capfd.readouterr().err


def test_what_wants_a_reboot_waits_for_it(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.find(finding())
    main([])
    site.find()
    main([])
    assert site.slurm.drained == ["n1"]
    assert "stays drained: the node has not booted since" in capfd.readouterr().err
    # The same drain, made during another boot.
    path = site.spool / "history.jsonl"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    path.write_text(path.read_text().replace(boot, "another-boot"))
    main([])
    assert site.slurm.drained == []


def test_what_a_person_must_mend_waits_for_the_word(site: GateSite) -> None:
    site.find(finding(action="service"))
    main([])
    site.find()
    main([])
    assert site.slurm.drained == ["n1"]
    assert cli.main(["repaired", "--config", str(site.toml), "--node", "n1"]) == 0
    main([])
    assert site.slurm.drained == []


@pytest.mark.parametrize(
    "text",
    [
        "replace the fan",
        "Robust:node:x:-:none:job1",
        "robust:node:x:-:none:job1 do not touch",
        "robust: node:crash: job7:e1",
        "Prolog error",
    ],
)
def test_no_drain_of_anybody_else(site: GateSite, text: str) -> None:
    site.slurm.set(state="IDLE+DRAIN", reason=text)
    main([])
    assert site.slurm.drained == ["n1"] and site.slurm.orders == []


@pytest.mark.parametrize("state", ["DOWN+DRAIN", "IDLE+DRAIN+MAINT", "IDLE+DRAIN+REBOOT_ISSUED"])
def test_no_node_that_is_also_something_else(site: GateSite, state: str) -> None:
    site.slurm.set(state=state, reason="robust:node:broken:-:none:job1")
    main([])
    assert site.slurm.orders == []


def test_a_node_that_still_fails_stays(site: GateSite) -> None:
    site.find(finding(action="none"))
    main([])
    site.find(finding("ERROR", "none", "tool"))
    main([])
    assert site.slurm.drained == ["n1"]


def test_a_person_who_is_quicker_by_a_moment(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    from health import sweep

    site.find(finding(action="none"))
    main([])
    site.find()
    real = sweep.why_not

    def meanwhile(*args: Any) -> str:
        site.slurm.set(reason="robust:node:broken:gpu3:none:job0 I look at it")
        return real(*args)

    monkeypatch.setattr(sweep, "why_not", meanwhile)
    main([])
    # The new reason begins as ours did; it is the whole that counts.
    assert site.slurm.drained == ["n1"]
    assert site.events("undrain") == []


def test_slurms_own_words_for_our_drain(site: GateSite) -> None:
    """slurmctld was away when the prolog closed, and drained by itself on exit code 1."""
    site.environ(job=7)
    site.slurm.die()
    site.find(finding(action="none"))
    assert prolog([]) == 1
    site.slurm.live()
    site.slurm.set(state="IDLE+DRAIN", reason="Prolog error")
    site.environ(job=0)
    main([])
    assert site.slurm.drained == ["n1"]  # it still fails
    site.find()
    main([])
    assert site.slurm.drained == []
    assert site.event("undrain")["reason"] == "Prolog error"


def test_dry_run_undrains_nothing(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.find(finding(action="none"))
    main([])
    site.find()
    assert main(["--dry-run"]) == 0
    assert site.slurm.drained == ["n1"]
    assert "would be undrained" in capfd.readouterr().err


def test_leftovers_must_really_be_gone(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    from epilog import cleanup
    from epilog.cli import main as epilog

    left = cleanup.Cleared(0, 0, [cleanup.LEFT.found("left after SIGKILL: 5 (cat) state R")])
    monkeypatch.setattr(cleanup, "clear", lambda *args: left)
    site.environ(job=7)
    epilog([])
    site.environ(job=0)
    main([])
    assert site.slurm.drained == ["n1"]
    asked: list[Any] = []

    def clear(*args: Any) -> cleanup.Cleared:
        asked.append(args[:3])
        return cleanup.Cleared(0, 0, [])

    monkeypatch.setattr(cleanup, "clear", clear)
    main([])
    assert asked == [(7, GONE, "user")]
    assert site.slurm.drained == []


# -- late accusations -------------------------------------------------------------------------


@needs_root
def test_an_accusation_that_came_after_the_epilog(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    site.accuse()
    site.environ(job=0)
    main([])
    main([])
    assert site.event("accusation")["result"] == "cleared"
    assert site.event("strike")["uid"] == GONE


@needs_root
def test_of_a_job_that_was_not_here_nothing_is_read(site: GateSite) -> None:
    site.accuse()
    main([])
    assert site.events("accusation", "rejected") == []


@needs_root
def test_a_late_forged_one_is_refused(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    path = site.accuse(uid=666)
    assert path.exists()
    site.environ(job=0)
    main([])
    assert site.event("rejected")["owner"] == 666
    assert site.events("strike") == []


# -- files ------------------------------------------------------------------------------------


def test_what_could_not_be_shared_is_brought_there(site: GateSite) -> None:
    (site.state / "nodes").rename(site.state / "away")
    site.find(finding("WARN", "none"))
    main([])
    (site.state / "away").rename(site.state / "nodes")
    main([])
    assert len(site.shared("boot")) == 1 and len(site.shared("run")) == 2


def test_the_fleets_values_come_to_the_node(site: GateSite) -> None:
    main([])
    shared = site.state / "nodes" / "fleet.json"
    shared.write_text(json.dumps({"driver": ["570.133.20"]}))
    main([])
    assert json.loads((site.spool / "fleet.json").read_text()) == {"driver": ["570.133.20"]}
    assert copy_fleet(str(site.state), str(site.spool)) is False


@pytest.mark.parametrize("what", ["junk", "list", "writable", "link"])
def test_fleet_values_that_cannot_be_trusted(
    site: GateSite, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    main([])
    shared = site.state / "nodes" / "fleet.json"
    shared.write_text("{" if what == "junk" else "[]" if what == "list" else "{}")
    if what == "writable":
        shared.chmod(0o666)
    if what == "link":
        shared.rename(site.state / "elsewhere")
        shared.symlink_to(site.state / "elsewhere")
    assert main([]) == 0
    assert not (site.spool / "fleet.json").exists()
    assert str(site.state) in capfd.readouterr().err


def test_no_state_directory(site: GateSite) -> None:
    site.settings(state=False)
    site.find(finding(action="none"))
    main([])
    site.find()
    main([])
    assert site.slurm.drained == []
    assert site.shared() == [] and len(site.events("drain", "undrain")) == 2


def test_a_history_that_cannot_be_read(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    main([])
    (site.spool / "history.jsonl").chmod(0o666)
    site.find(finding(action="none"))
    assert main([]) == 0
    assert site.slurm.drained == ["n1"]
    assert "can be written by others" in capfd.readouterr().err


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_the_last_usable_settings_are_kept(
    site: GateSite, enabled: str, capfd: pytest.CaptureFixture[str]
) -> None:
    site.settings(gate=f"enabled = {enabled}")
    main([])
    last = site.toml.with_name("robust.toml.last")
    good = site.toml.read_bytes()
    assert last.read_bytes() == good and last.stat().st_mode & 0o777 == 0o644
    site.toml.write_text("[gate\n")
    main([])
    assert last.read_bytes() == good
    assert capfd.readouterr().err == ""


def test_of_a_deleted_file_no_copy_is_kept(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.settings(gate="enabled = false")
    main([])
    last = site.toml.with_name("robust.toml.last")
    assert last.exists()
    site.toml.unlink()
    off = settings.load(str(last), "n1", ())  # the default spool is real
    monkeypatch.setattr(gate, "load", lambda *args: off)
    assert main([]) == 0
    assert not last.exists()


def test_what_was_switched_off_stays_off_when_the_file_breaks(site: GateSite) -> None:
    site.settings(gate="enabled = false")
    main([])
    site.toml.write_text(site.toml.read_text() + "[gate]\n")  # twice the same table
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.calls == []


# -- itself -----------------------------------------------------------------------------------


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


def test_new_messages_of_the_driver_are_kept(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    from health import live
    from health.system import LogRecord

    text = "NVRM: Xid (PCI:0000:3b:00): 13, pid=5, name=python, Graphics Exception"
    monkeypatch.setattr(live.kmsg, "read", lambda *args: [LogRecord(1, 5.0, 4, text)])
    main([])
    main([])
    (xid,) = site.events("xid")
    assert (xid.data["code"], xid.data["gpu"]) == (13, "0000:3b:00.0")


def test_every_action_has_a_proof_that_the_tests_know() -> None:
    known = {"none", "clear-leftovers", "restart-fabric-manager", "reset-gpu", "reboot", "service"}
    assert {action.name for action in LADDER} == known


def test_the_history_is_what_the_module_writes(site: GateSite) -> None:
    site.find(finding())
    main([])
    assert history.load(str(site.spool)) == site.shared()
    assert all(abs(e.time - time.time()) < 600 or e.kind == "boot" for e in site.events())
