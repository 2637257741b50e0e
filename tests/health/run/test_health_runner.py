"""The runner: findings, deadlines, hangs, crashes; no failure of its own opens the gate."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_system import FakeSystem

from health import settings
from health.check import EVERYWHERE, Check, Condition, Where
from health.children import child
from health.finding import Finding
from health.gate.verdict import judge
from health.node.gpu_snapshot import GpuSnapshot
from health.node.stuck import Stuck
from health.node.system import System
from health.nvidia import nvml
from health.nvidia.nvml import Collector
from health.run import runner, worker
from health.run.lane import FamilyResult
from health.run.report import GateReport
from health.run.runner import run, run_inline
from robust_slurm.text import LIMIT

LONG_S = 30.0  # a deadline that no test reaches
WARN = Finding("WARN", "node", "disk-low", "/", "3 GiB", "none")
FAIL = Finding("FAIL", "node", "mount-missing", "/scratch", "not mounted", "none")


class Node(FakeSystem):
    """A fake node that can be run against."""

    def __init__(self, spool: Path, gate: Mapping[str, Any] | None = None, **more: Any):
        super().__init__(**more)
        base = settings.defaults(())
        self.settings = base._replace(gate={**base.gate, "spool": str(spool), **(gate or {})})
        self.stuck = Stuck(str(spool / "stuck"))

    def start_nvml(self, deadline_s: float) -> Collector:
        return Collector(deadline_s, self.stuck)

    def take_nvml(self, snapshot: GpuSnapshot) -> None:
        self.snapshot = snapshot


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def family(
    name: str,
    does: Callable[[System], list[Finding]] = lambda system: [],
    where: frozenset[Where] = EVERYWHERE,
    needs_nvml: bool = False,
    closes: bool = True,
    deadline_s: float = LONG_S,
    conditions: tuple[Condition, ...] = (),
) -> Check:
    return Check(name, does, conditions, {}, where, needs_nvml, closes, deadline_s)


def hangs(system: System) -> list[Finding]:
    time.sleep(3600)
    return []


def raises(system: System) -> list[Finding]:
    raise KeyError("gone")


def dies(system: System) -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def ids(report: GateReport) -> list[str]:
    return [finding.check for finding in report.findings]


def statuses(report: GateReport) -> dict[str, str]:
    return {row.family: row.status for row in report.ran}


@pytest.fixture(autouse=True)
def quick_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML answers at once, unless a test says otherwise."""
    answers(monkeypatch, ["top", {"count": 2, "driver": "1.2"}], ["stage", "done"])


def answers(monkeypatch: pytest.MonkeyPatch, *lines: object, hang: bool = False) -> None:
    def collect(fd: int, needed: object) -> None:
        for line in lines:
            child.write_all(fd, json.dumps(line).encode() + b"\n")
        if hang:
            time.sleep(3600)

    monkeypatch.setattr(nvml, "_collect", collect)


def test_findings_come_in_the_order_of_the_checks(node: Node) -> None:
    checks = [
        family("gpus", lambda s: [FAIL._replace(check="a")], needs_nvml=True),
        family("disk", lambda s: [WARN]),
        family("clock"),
        family("mounts", lambda s: [FAIL, WARN]),
    ]
    report = run(node, checks, "prolog", LONG_S)
    assert ids(report) == ["a", "disk-low", "mount-missing", "disk-low"]
    assert [(row.family, row.status) for row in report.ran] == [
        ("gpus", "FAIL"),
        ("disk", "WARN"),
        ("clock", "PASS"),
        ("mounts", "FAIL"),
    ]
    assert all(row.ms >= 0 for row in report.ran) and report.total_ms > 0
    assert (report.node, report.where, report.job, report.time) == ("n1", "prolog", 7, node.now())
    assert report.findings[1] == WARN
    assert judge(report, node.settings).closed


def test_only_the_checks_of_the_place_run(node: Node) -> None:
    checks = [
        family("always"),
        family("sweep_only", where=frozenset({"sweep", "deep"})),
        family("prolog_only", where=frozenset({"prolog"})),
    ]
    assert set(statuses(run(node, checks, "prolog", LONG_S))) == {"always", "prolog_only"}
    assert set(statuses(run(node, checks, "sweep", LONG_S))) == {"always", "sweep_only"}
    report = run(node, checks, "prolog", LONG_S, only=["always"])
    assert set(statuses(report)) == {"always"}


def test_gpu_checks_see_what_nvml_said(node: Node) -> None:
    def look(system: System) -> list[Finding]:
        return [WARN._replace(evidence=f"{system.nvml()['count']} {system.nvml()['driver']}")]

    report = run(node, [family("plain"), family("gpus", look, needs_nvml=True)], "prolog", LONG_S)
    assert report.findings[0].evidence == "2 1.2"


def test_without_gpu_checks_nvml_is_left_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "start_nvml", lambda self, deadline_s: pytest.fail("asked"))
    assert statuses(run(node, [family("plain")], "prolog", LONG_S)) == {"plain": "PASS"}


def test_a_hang_of_nvml_leaves_the_gpu_checks_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ["stage", "gpu1 ecc"], hang=True)

    def look(system: System) -> list[Finding]:
        snapshot = system.nvml()
        return [FAIL._replace(evidence=snapshot["stage"])] if snapshot["hung"] else []

    report = run(node, [family("nvml", look, needs_nvml=True), family("disk")], "prolog", 4.0)
    assert statuses(report) == {"nvml": "FAIL", "disk": "PASS"}
    assert report.findings[0].evidence.startswith("gpu1 ecc (state S")


def test_a_check_that_hangs_fails_and_the_rest_goes_on(node: Node) -> None:
    checks = [family("before"), family("mounts", hangs, deadline_s=3.0), family("after")]
    report = run(node, checks, "prolog", LONG_S)
    (finding,) = report.findings
    assert (finding.status, finding.cls, finding.check) == ("FAIL", "tool", "mounts-hung")
    assert "within 3 s" in finding.evidence and "state S" in finding.evidence
    assert statuses(report) == {"before": "PASS", "mounts": "FAIL", "after": "PASS"}


def test_a_machine_that_was_paused_blames_no_check(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines are paused, all of a host at once: the check had no time to answer."""

    class Paused:
        """A poll during which the machine stands still for longer than the check may take."""

        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, ms: float) -> list[tuple[int, int]]:
            if pauses:
                time.sleep(pauses.pop())
                return []
            return self._poll.poll(ms)

    poll, pauses = select.poll, [4.5]
    monkeypatch.setattr(runner.select, "poll", Paused)
    slow = family("mounts", lambda _system: time.sleep(5.0) or [], deadline_s=1.0)
    report = run(node, [slow, family("after")], "prolog", LONG_S)
    assert not pauses and statuses(report) == {"mounts": "PASS", "after": "PASS"}


def test_a_check_that_cannot_be_killed_is_left_behind_and_not_run_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        pids.append(self.pid)
        return False

    checks = [family("mounts", hangs, deadline_s=0.3), family("after")]
    with monkeypatch.context() as held:
        held.setattr(child.Child, "stop", stop)
        begin = time.monotonic()
        report = run(node, checks, "prolog", LONG_S)
        assert time.monotonic() - begin < 10
    assert ids(report) == ["mounts-hung"]
    again = run(node, checks, "prolog", LONG_S)
    assert ids(again) == ["mounts-hung"] and "still hangs" in again.findings[0].evidence
    assert statuses(again)["after"] == "PASS"
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    assert ids(run(node, [family("mounts"), family("after")], "prolog", LONG_S)) == []


WARNS = (Condition("bmc-event", "WARN", "node", "none", "a fault of hardware"),)


def test_a_family_that_only_warns_closes_nothing_by_its_silence(node: Node) -> None:
    checks = [family("bmc", hangs, conditions=WARNS, deadline_s=0.3), family("after")]
    report = run(node, checks, "prolog", LONG_S)
    (finding,) = report.findings
    assert (finding.status, finding.check) == ("WARN", "bmc-hung")
    assert statuses(report) == {"bmc": "WARN", "after": "PASS"}
    assert not judge(report, node.settings).closed


def test_families_that_only_warn_close_nothing_when_the_time_is_over(node: Node) -> None:
    slow = family("slow", hangs, conditions=WARNS, deadline_s=60.0)
    report = run(node, [slow, family("late", conditions=WARNS)], "prolog", 1.0)
    (finding,) = report.findings
    assert (finding.status, finding.check) == ("WARN", "gate-deadline")


def test_the_whole_deadline_closes_for_what_did_not_run(node: Node) -> None:
    checks = [family("first"), family("slow", hangs), family("never")]
    begin = time.monotonic()
    report = run(node, checks, "prolog", 2.0)
    assert 2.0 <= time.monotonic() - begin < LONG_S
    (finding,) = report.findings
    assert (finding.status, finding.cls, finding.check) == ("ERROR", "tool", "gate-deadline")
    assert "slow, never" in finding.evidence
    assert statuses(report) == {"first": "PASS", "slow": "not-run", "never": "not-run"}
    verdict = judge(report, node.settings)
    assert verdict.closed and verdict.reason == "robust:tool:gate-deadline:-:none:job7"


def test_what_was_found_before_the_whole_deadline_counts(node: Node) -> None:
    report = run(node, [family("mounts", lambda s: [FAIL]), family("slow", hangs)], "prolog", 2.0)
    assert ids(report) == ["mount-missing", "gate-deadline"]


def test_a_check_that_may_fail_still_has_to_run(node: Node) -> None:
    report = run(node, [family("load", hangs, closes=False)], "prolog", 0.5)
    assert ids(report) == ["gate-deadline"] and judge(report, node.settings).closed


def test_no_time_at_all_closes(node: Node) -> None:
    report = run(node, [family("a"), family("b", needs_nvml=True)], "prolog", 0.0)
    assert ids(report) == ["gate-deadline"] and judge(report, node.settings).closed


def test_an_exception_is_an_error_that_says_where(node: Node) -> None:
    report = run(node, [family("odd", raises), family("after")], "prolog", LONG_S)
    (finding,) = report.findings
    assert (finding.status, finding.cls, finding.check) == ("ERROR", "tool", "odd-error")
    assert finding.evidence.startswith("KeyError: 'gone' (")
    assert judge(report, node.settings).closed
    assert statuses(report)["after"] == "PASS"


def test_an_error_of_a_check_that_may_fail_does_not_close(node: Node) -> None:
    own = Finding("ERROR", "tool", "load-unknown", "", "unreadable", "none")
    checks = [family("load", lambda s: [own], closes=False), family("odd", raises, closes=False)]
    report = run(node, checks, "prolog", LONG_S)
    assert report.tolerated == ["load-unknown", "odd-error"]
    assert not judge(report, node.settings).closed
    report = run(node, [family("odd", lambda s: [FAIL], closes=False)], "prolog", LONG_S)
    assert judge(report, node.settings).closed


def test_a_worker_that_dies_is_an_error_and_the_rest_goes_on(node: Node) -> None:
    checks = [family("before"), family("bad", dies), family("after", lambda s: [WARN])]
    report = run(node, checks, "prolog", LONG_S)
    assert ids(report) == ["bad-error", "disk-low"]
    assert "signal 11" in report.findings[0].evidence
    assert judge(report, node.settings).closed


def test_a_check_that_leaves_the_process_is_an_error(node: Node) -> None:
    def leaves(system: System) -> list[Finding]:
        os._exit(0)

    assert ids(run(node, [family("bad", leaves)], "prolog", LONG_S)) == ["bad-error"]


@pytest.mark.parametrize(
    "line",
    [
        b'["done", "after", 0.0, [], ""]\n',
        b'["done", "bad", 0.0, [["FAIL"]], ""]\n',
        b"[]\n",
        b"nonsense\n",
    ],
)
def test_a_lying_worker_is_an_error(node: Node, line: bytes) -> None:
    def lies(system: System) -> list[Finding]:
        child.write_all(3, line)
        return []

    report = run(node, [family("bad", lies), family("after")], "prolog", LONG_S)
    assert ids(report) == ["bad-error"] and statuses(report)["after"] == "PASS"


def test_no_process_left_for_a_worker_closes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    report = run(node, [family("a"), family("b", needs_nvml=True)], "prolog", LONG_S)
    assert sorted(ids(report)) == ["a-error", "b-error"]
    assert judge(report, node.settings).closed


def test_evidence_is_one_short_line_and_findings_are_not_endless(node: Node) -> None:
    def many(system: System) -> list[Finding]:
        long = FAIL._replace(evidence="a\nb\x1b[31m" + "x" * 10_000, device="d" * 1000)
        return [WARN] * 1000 + [long]

    report = run(node, [family("mounts", many)], "prolog", LONG_S)
    assert len(report.findings) == worker.MOST_FINDINGS + 1
    assert report.findings[0].status == "FAIL"  # the worst are kept
    text = report.findings[0].evidence
    assert len(text) == LIMIT and "\n" not in text and "\x1b" not in text
    assert len(report.findings[0].device) == 128
    assert report.findings[-1].check == "mounts-many"


def test_the_kill_switch_leaves_families_out_and_drops_findings(tmp_path: Path) -> None:
    node = Node(tmp_path, gate={"disabled": ["clock", "mount-missing", "odd-error", "unheard-of"]})
    checks = [
        family("clock", lambda s: [FAIL]),
        family("mounts", lambda s: [FAIL, WARN]),
        family("odd", raises),
    ]
    report = run(node, checks, "prolog", LONG_S)
    assert ids(report) == ["disk-low"]
    assert statuses(report) == {"mounts": "WARN", "odd": "PASS", "clock": "disabled"}
    assert report.disabled == ["clock", "mount-missing", "odd-error"]
    assert not judge(report, node.settings).closed


def test_a_site_file_that_cannot_be_used_is_said_in_every_report(node: Node) -> None:
    node.settings = node.settings._replace(problems=("robust.toml: is a link", "[gate.x] unknown"))
    report = run(node, [family("clock")], "prolog", LONG_S)
    assert ids(report) == ["config-unusable", "config-unusable"]
    assert {f.status for f in report.findings} == {"WARN"}
    assert not judge(report, node.settings).closed


def test_inline_gives_the_same_as_with_processes(node: Node) -> None:
    checks = [
        family("disk", lambda s: [WARN]),
        family("odd", raises),
        family("load", raises, closes=False),
        family("mounts", lambda s: [FAIL]),
    ]
    forked = run(node, checks, "prolog", LONG_S)
    inline = run_inline(node, checks, "prolog", node.settings)
    assert inline.findings == forked.findings
    assert statuses(inline) == statuses(forked)
    assert inline.tolerated == forked.tolerated


def test_what_the_runner_saw_can_be_given_again(node: Node) -> None:
    seen: list[FamilyResult] = []
    checks = [family("mounts", hangs, deadline_s=0.3), family("bad", dies), family("disk")]
    report = run(node, checks, "prolog", LONG_S, seen=seen.append)
    given = [outcome for outcome in seen if outcome.by_runner]
    assert sorted(outcome.check.name for outcome in given) == ["bad", "mounts"]
    again = run_inline(node, checks, "prolog", node.settings, given=given)
    assert again.findings == report.findings


def test_a_report_is_json(node: Node) -> None:
    report = run(node, [family("mounts", lambda s: [FAIL])], "prolog", LONG_S)
    out = json.loads(json.dumps(report.as_dict()))
    assert out["status"] == "FAIL" and out["findings"][0]["class"] == "node"
    assert out["ran"][0]["family"] == "mounts" and out["ran"][0]["ms"] >= 0
