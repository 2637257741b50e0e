"""The epilog: clears, proves, follows accusations up; who is drained, cleared, refused."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from gate_site import GONE, GateSite, finding

from epilog.cli import main
from health.gate import strikes
from health.leftovers import cleanup
from health.node import rootfiles
from health.node.system import Event

pytestmark = pytest.mark.slow

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateSite:
    return GateSite(tmp_path, monkeypatch)


def test_all_well(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert site.slurm.calls == [] and site.events() == []
    assert capfd.readouterr() == ("", "")


def test_a_fault_drains_and_slurm_hears_no_failure(site: GateSite) -> None:
    site.find(finding())
    assert main([]) == 0  # our reason stands: no "Epilog error" wanted
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:reboot:job7"
    assert site.event("drain")["where"] == "epilog"


def test_only_a_drain_that_could_not_be_placed_is_an_epilog_error(site: GateSite) -> None:
    site.slurm.die()
    site.find(finding())
    assert main([]) == 1
    assert site.event("drain")["as"] == "Epilog error"


def test_beyond_the_breaker(site: GateSite) -> None:
    site.settings("[breaker]\nmax_nodes = 0\n")
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.drained == []


def test_what_the_prolog_drained_is_not_drained_again(site: GateSite) -> None:
    site.find(finding())
    main([])
    main([])
    assert len(site.events("drain")) == 1 and len(site.slurm.orders) == 1
    assert [e.data["did"] for e in site.events("run")] == ["drained", "is drained already"]


def test_its_own_bug_closes(site: GateSite) -> None:
    site.break_with(KeyError("nobody thought of this"))
    assert main([]) == 1
    assert site.slurm.node()["reason"] == "robust:tool:gate-crashed:-:none:job7"


def test_a_slurm_conf_that_does_not_answer_hangs_nothing(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("health.node.jobs._LOOK_S", 0.3)
    monkeypatch.setattr("health.node.jobs.running", lambda system: time.sleep(60))
    began = time.monotonic()
    assert main([]) == 0
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["now"], 2)])
def test_arguments_of_a_person(site: GateSite, words: list[str], code: int) -> None:
    site.find(finding())
    assert main(words) == code
    assert site.slurm.calls == []


def test_switched_off_and_dry_run(site: GateSite) -> None:
    site.find(finding())
    site.settings(gate="enabled = false")
    assert main([]) == 0
    site.settings()
    assert main(["--dry-run"]) == 0
    assert site.slurm.calls == []


# -- leftovers --------------------------------------------------------------------------------


@needs_root
def test_leftovers_are_cleared_and_told(site: GateSite) -> None:
    uid = 4_000_000 + os.getpid()  # nobody else's on this machine
    comm = Path("/proc/self/comm")
    name = comm.read_text()
    comm.write_text("slurmd")  # above the processes of jobs
    process = subprocess.Popen(["/bin/sleep", "600"], user=uid, env={"SLURM_JOB_ID": "7"})
    try:
        site.environ(uid=uid)
        assert main([]) == 0
        assert process.wait(10) == -15
        assert site.event("cleared")["ended"] == 1
        assert site.slurm.calls == []
    finally:
        process.kill()
        comm.write_text(name)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (cleanup.LEFT, "robust:user:leftover-processes:-:clear-leftovers:job7"),
        (cleanup.STUCK, "robust:node:leftover-processes-stuck:-:reboot:job7"),
        (cleanup.FAILED, "robust:tool:cleanup-error:-:none:job7"),
    ],
)
def test_what_stays_drains(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, condition: cleanup.Condition, reason: str
) -> None:
    left = cleanup.Cleared(0, 0, [condition.found("left after SIGKILL: 5 (cat) state D")])
    monkeypatch.setattr(cleanup, "clear", lambda *args: left)
    assert main([]) == 0
    assert site.slurm.node()["reason"] == reason


def test_the_settings_of_the_clean_up(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def clear(*args: object) -> cleanup.Cleared:
        asked.append(args)
        return cleanup.Cleared(0, 0, [])

    monkeypatch.setattr(cleanup, "clear", clear)
    (site.path / "n1_9.0").touch()  # a step of job 9 listens in slurmd's spool
    main([])
    text = "[epilog]\nleftovers = 'user'\nclean_shm = false\nclean_dirs = ['/scratch']\n"
    site.settings(text)
    main([])
    assert asked[0][:5] == (7, GONE, "job", frozenset({9}), ["/dev/shm"])
    assert asked[1][2:5] == ("user", frozenset({9}), ["/scratch"])


# -- accusations ------------------------------------------------------------------------------


@needs_root
def test_a_false_report_is_cleared_with_a_strike(site: GateSite) -> None:
    site.report_node()
    assert main([]) == 0
    assert site.slurm.calls == []
    told = site.event("accusation")
    assert (told["result"], told["job"], told["uid"]) == ("cleared", 7, GONE)
    assert told["said"] == ["no report for 6.0 s"]
    strike = site.event("strike")
    assert (strike["job"], strike["uid"], strike["check"]) == (7, GONE, "node_lost")
    assert len(site.shared("strike")) == 1


@needs_root
def test_a_report_counts_once(site: GateSite) -> None:
    site.report_node()
    main([])
    main([])  # requeued, and on this node again
    site.report_node(name="n1.e4.json", incident="e4")
    main([])
    assert len(site.events("strike")) == 1
    assert len(site.events("accusation")) == 2


@needs_root
def test_a_true_report_drains_with_the_evidence(site: GateSite) -> None:
    site.report_node()
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.node()["reason"] == "robust:node:broken:gpu3:reboot:job7"
    told = site.event("accusation")
    assert told["result"] == "confirmed" and "it was seen to be broken" in told["why"][0]
    assert site.events("strike") == []


@needs_root
def test_a_user_s_own_leftovers_confirm_nothing(site: GateSite) -> None:
    site.report_node()
    site.find(finding(cls="user", action="clear-leftovers"))
    main([])
    assert site.slurm.drained == ["n1"]
    assert site.event("accusation")["result"] == "cleared"


@needs_root
def test_a_standby_node_is_reported_in_the_main_job_s_directory(site: GateSite) -> None:
    path = site.report_node(job=5)
    record = json.loads(path.read_text()) | {"job": 7}
    path.write_text(json.dumps(record))
    site.environ(SLURM_JOB_COMMENT="robust: standby of job 5")
    main([])
    assert site.event("strike")["job"] == 7


@needs_root
def test_a_forged_one_is_refused_and_recorded(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    path = site.report_node()
    os.chown(path, 666, 666)
    assert main([]) == 0
    assert site.slurm.calls == [] and site.events("strike", "accusation") == []
    refused = site.event("rejected")
    assert (refused["owner"], refused["job"], refused["uid"]) == (666, 7, GONE)
    assert "belongs to uid 666" in refused["why"]
    assert "rejected report n1.e3.json" in capfd.readouterr().err
    main([])
    assert len(site.events("rejected")) == 1


@needs_root
def test_the_deeper_checks_are_run(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    from health.gate import gate

    asked: list[str] = []
    real = gate.run

    def run(system: object, checks: object, where: str, deadline_s: float, **more: Any) -> object:
        asked.append(where)
        return real(system, checks, where, deadline_s, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(gate, "run", run)
    main([])
    site.report_node()
    main([])
    assert asked == ["epilog", "deep"]


@needs_root
@pytest.mark.parametrize(
    ("script", "drained", "result"),
    [
        ("exit 0", False, "cleared"),
        ("echo 'busbw 12 GB/s, wanted 400'; exit 1", True, "confirmed"),
        ("exit 3", False, "cleared"),
        ("exec sleep 60", False, "cleared"),
    ],
)
def test_the_sites_own_tests(site: GateSite, script: str, drained: bool, result: str) -> None:
    test = site.path / "test.sh"
    test.write_text(f"#!/bin/sh\n{script}\n")
    test.chmod(0o755)
    site.settings(f"[accusations]\ntests = ['{test}']\ndeadline = 1.0\n")
    main([])  # nobody accused: not run
    assert site.events("run") == []
    site.report_node()
    assert main([]) == 0
    event = site.event("accusation")
    assert event["result"] == result
    assert event.get("tested", False) is (script == "exit 0"), (
        "only tests that passed prove it good"
    )
    if drained:
        assert site.event("drain")["reports"] == [{"job": 7, "name": "n1.e3.json"}]
        assert site.slurm.node()["reason"] == "robust:node:accusation-test:-:service:job7"
        assert "busbw 12 GB/s" in site.event("drain")["evidence"]
    else:
        assert site.slurm.drained == []


@needs_root
def test_tests_are_not_run_beside_another_job(site: GateSite) -> None:
    site.settings("[accusations]\ntests = ['/bin/false']\n")
    (site.path / "n1_9.0").touch()
    site.report_node()
    main([])
    assert "another job runs here" in site.event("accusation")["why"][0]
    assert site.slurm.drained == []


@needs_root
def test_a_job_strikes_a_part_of_its_nodes(site: GateSite) -> None:
    """One user must not be able to give every node of a large job a strike."""
    site.environ(job=7, SLURM_JOB_NODELIST="n[1-128]", SLURM_JOB_ACCOUNT="physics")
    site.report_node()
    for node, struck in (("n8", True), ("n9", True), ("n1", False), ("n9", True)):
        strikes.claim(str(site.state), 7, node, 2, time.time())
        assert (node in of_job(site)) is struck
    assert main([]) == 0
    assert site.event("accusation")["result"] == "cleared"
    assert site.events("strike") == [], "two other nodes have one of this job"
    site.environ(job=8, SLURM_JOB_NODELIST="n[1-128]", SLURM_JOB_ACCOUNT="physics")
    site.report_node(job=8)
    assert main([]) == 0
    assert site.event("strike")["account"] == "physics"


def of_job(site: GateSite) -> set[str]:
    path = site.state / "nodes" / "strikes.jsonl"
    return strikes.of_job(rootfiles.records(path.read_bytes()), 7)


@needs_root
def test_strikes_of_different_users_make_a_lemon(site: GateSite) -> None:
    for job, uid in ((1, GONE), (2, GONE), (3, GONE)):
        site.environ(job=job, uid=uid)
        site.report_node(job=job, uid=uid)
        assert main([]) == 0
    assert site.slurm.drained == []  # one user alone makes no lemon
    site.environ(job=4, uid=GONE + 1)
    site.report_node(job=4, uid=GONE + 1)
    assert main([]) == 0
    assert site.slurm.node()["reason"] == "robust:node:lemon:-:service:job4"
    assert "4 jobs of 2 users" in site.event("drain")["evidence"]


@needs_root
def test_the_job_is_noted_for_the_sweep(site: GateSite) -> None:
    from health.history import job_notes

    main([])
    (note,) = job_notes.notes(str(site.spool), time.time())
    assert (note.job, note.uid, note.gid) == (7, GONE, 1)
    draft = site.spool / "jobs" / ".8.json.n1.4242"  # another epilog's, half written
    draft.write_bytes(b"{")
    assert job_notes.notes(str(site.spool), time.time() + 2 * job_notes.LATE_S) == []
    assert list((site.spool / "jobs").iterdir()) == [draft], "that job's note was lost"


@needs_root
def test_a_note_of_somebody_else_is_none(site: GateSite) -> None:
    from health.history import job_notes

    main([])
    forged = site.spool / "jobs" / "8.json"
    forged.write_text(json.dumps([8, GONE, 1, 0, time.time(), []]))
    os.chown(forged, 666, 666)
    (site.spool / "jobs" / "9.json").write_text("[9, 0, 1, 0, 1, []]")
    assert [n.job for n in job_notes.notes(str(site.spool), time.time())] == [7]


@needs_root
def test_while_the_sweep_is_at_it_the_epilog_leaves_it(site: GateSite) -> None:
    main([])
    site.report_node()
    held = rootfiles.lock(rootfiles.open_dir(str(site.spool)), "inquiry.lock")
    main([])
    assert site.events("accusation") == []
    os.close(held)
    main([])
    assert len(site.events("accusation")) == 1


def test_a_job_of_root_reports_nobody(site: GateSite) -> None:
    site.environ(uid=0)
    assert main([]) == 0
    assert not (site.spool / "jobs").exists()


def test_a_state_directory_that_is_gone_changes_nothing(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.state.rename(site.path / "away")
    assert main([]) == 0
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.drained == ["n1"]
    assert "not recorded" in capfd.readouterr().err


@needs_root
def test_events_of_another_boot_still_count(site: GateSite) -> None:
    from health.history import events

    old = Event(time.time() - 86400, "strike", "older-boot", {"job": 1, "uid": GONE + 1})
    events.append(str(site.spool), [old, old._replace(data={"job": 2, "uid": GONE + 2})])
    site.report_node()
    main([])
    assert site.slurm.node()["reason"] == "robust:node:lemon:-:service:job7"


def test_xids_of_programs_are_written_down_with_the_user(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Event(time.time(), "app-xid", "boot", {"gpu": "0000:3b:00.0", "job": 7, "uid": 1000})
    monkeypatch.setattr("health.checks.gpu.xid.of_job", lambda system: [event])
    assert main([]) == 0 and site.events("app-xid") == []
    site.find(finding("WARN", "none", "user", check="xid-app"))
    assert main([]) == 0
    assert [e.data["uid"] for e in site.events("app-xid")] == [1000]
