"""Recording a node and replaying the tree: the same answers, the same verdict."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from health import settings
from health.check import EVERYWHERE, Check
from health.checks import ALL
from health.children.child import write_all
from health.finding import Finding
from health.gate.verdict import judge
from health.node.system import CommandOutput, Context, System
from health.nvidia import nvml
from health.recording.record import RecordingSystem
from health.recording.replay import BadTree, ReplaySystem
from health.run.live import LiveSystem
from health.run.report import GateReport
from health.run.runner import run

LONG_S = 60.0
ENV = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/nowhere/slurm.conf"}


def live(checks: Sequence[Check], spool: Path) -> LiveSystem:
    base = settings.defaults(checks)
    mine = base._replace(gate={**base.gate, "spool": str(spool)}, problems=("[gate.x] is unknown",))
    return LiveSystem(mine, Context("deep", "n1", 7, 1000, ENV))


def recorded(
    checks: Sequence[Check], tmp_path: Path, deadline_s: float = LONG_S
) -> tuple[GateReport, ReplaySystem]:
    system = RecordingSystem(live(checks, tmp_path / "spool"), str(tmp_path / "tree"))
    report = run(system, checks, "deep", deadline_s, seen=system.saw)
    system.finish()
    return report, ReplaySystem(str(tmp_path / "tree"), checks)


def same(one: GateReport, other: GateReport) -> None:
    assert one.findings == other.findings
    assert [(r.family, r.status) for r in one.ran] == [(r.family, r.status) for r in other.ran]
    assert (one.node, one.where, one.job, one.time) == (
        other.node,
        other.where,
        other.job,
        other.time,
    )
    assert (one.disabled, one.tolerated) == (other.disabled, other.tolerated)


def test_this_machine_recorded_gives_the_same_verdict(tmp_path: Path) -> None:
    report, replay = recorded(ALL, tmp_path)
    again = replay.report()
    same(report, again)
    known = live(ALL, tmp_path).settings
    assert judge(again, replay.settings) == judge(report, known)
    assert len(report.ran) == len(ALL)


def asks(tmp_path: Path) -> Check:
    """A check that asks everything and tells what it heard."""
    (tmp_path / "file").write_bytes(b"one\r\ntwo\xff\n")
    (tmp_path / "link").symlink_to("file")

    def heard(answer: Any) -> str:
        try:
            return repr(answer())
        except OSError as err:
            return f"{type(err).__name__} {err.errno} {err.strerror}"

    def look(s: System) -> list[Finding]:
        here = str(tmp_path)
        questions = {
            "read": lambda: s.read(f"{here}/file"),
            "read-again": lambda: s.read(f"{here}/file"),
            "read-none": lambda: s.read(f"{here}/none"),
            "read-dir": lambda: s.read(here),
            "read-odd": lambda: s.read(f"{here}/../{tmp_path.name}/file"),
            "names": lambda: s.names("/etc"),
            "names-none": lambda: s.names("/nowhere"),
            "link": lambda: s.link(f"{here}/link"),
            "link-none": lambda: s.link(f"{here}/file"),
            "entry": lambda: s.entry(f"{here}/link"),
            "entry-none": lambda: s.entry(f"{here}/none"),
            "disk": lambda: s.disk("/proc"),
            "disk-none": lambda: s.disk("/nowhere"),
            "probe": lambda: s.probe(here, False, LONG_S),
            "probe-write": lambda: s.probe("/proc", True, LONG_S),
            "command": lambda: s.command(["/bin/echo", "a b"], LONG_S),
            "command-none": lambda: s.command(["/nowhere/program"], LONG_S),
            "command-slow": lambda: s.command(["/bin/sleep", "3600"], 0.2)[0],
            "history": s.history,
            "fleet": s.fleet,
            "clock": s.clock_offset,
            "log": lambda: s.kernel_log()[-3:],
            "now": s.now,
            "uptime": s.uptime,
            "boot": s.boot_id,
            "nvml": lambda: s.nvml()["stage"],
            "options": lambda: s.options("asks"),
            "context": lambda: s.context,
        }
        return [Finding("WARN", "node", k, "", heard(q), "none") for k, q in questions.items()]

    return Check("asks", look, (), {}, needs_nvml=True, deadline_s=LONG_S)


def test_every_answer_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(fd: int, needed: object) -> None:
        write_all(fd, b'["stage", "done"]\n')

    monkeypatch.setattr(nvml, "_collect", collect)
    check = asks(tmp_path)
    report, replay = recorded([check], tmp_path)
    (tmp_path / "file").write_text("changed")
    again = replay.report()
    said = {f.check: f.evidence for f in report.findings}
    for finding in again.findings:
        assert finding.evidence == said[finding.check], finding.check
    same(report, again)
    assert said["read"] == repr("one\r\ntwo\ufffd\n") and "ENOENT" not in said["read-odd"]
    assert said["command"] == repr(CommandOutput(0, "a b\n", ""))
    assert said["read-none"].startswith("FileNotFoundError 2")
    assert said["command-slow"].startswith("TimeoutError 110")


def test_whose_files_fill_a_disk_is_kept_as_sums(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a").write_bytes(b"x" * 10_000)
    top = [str(tmp_path / "disk")]
    system = RecordingSystem(live(ALL, tmp_path / "spool"), str(tmp_path / "tree"))
    seen = system.usage(top, LONG_S)
    system.finish()
    assert ReplaySystem(str(tmp_path / "tree"), ALL).usage(top, 0.0) == seen
    assert seen.whole and seen.entries == 1


def test_a_process_looked_at_twice_is_kept_as_it_was_last(tmp_path: Path) -> None:
    """A process in state D for a moment is not left in the tree, nor in the recording."""

    def look(system: System) -> list[Finding]:
        with subprocess.Popen(["/bin/sleep", "3600"]) as child:
            path = f"/proc/{child.pid}/stat"
            first = system.read(path)
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            last = system.read(path)
            child.kill()
        assert first.split()[2] != "T"
        return [Finding("WARN", "node", "seen", "", last.split()[2], "none")]

    report, _ = recorded([Check("processes", look, (), {}, deadline_s=LONG_S)], tmp_path)
    assert report.findings[-1].evidence == "T"
    (kept,) = (tmp_path / "tree/files/proc").glob("*/stat")
    assert kept.read_text().split()[2] == "T"


def test_a_process_that_ended_is_not_in_the_tree(tmp_path: Path) -> None:
    def look(system: System) -> list[Finding]:
        with subprocess.Popen(["/bin/sleep", "3600"]) as child:
            path = f"/proc/{child.pid}/stat"
            assert system.read(path)
            child.kill()
            child.wait()
            with pytest.raises(FileNotFoundError):
                system.read(path)
        return []

    report, _ = recorded([Check("processes", look, (), {}, deadline_s=LONG_S)], tmp_path)
    assert [f.check for f in report.findings] == ["config-unusable"]
    assert not list((tmp_path / "tree/files").rglob("stat"))


def test_replay_waits_for_nothing(tmp_path: Path) -> None:
    system = built(tmp_path, {"/etc/x": ""})
    begin = time.monotonic()
    system.pause(3600.0)
    assert time.monotonic() - begin < LONG_S


def test_what_the_runner_saw_is_in_the_tree(tmp_path: Path) -> None:
    def hangs(system: System) -> list[Finding]:
        time.sleep(3600)
        return []

    def dies(system: System) -> list[Finding]:
        os.kill(os.getpid(), 9)
        return []

    checks = [
        Check("mounts", hangs, (), {}, EVERYWHERE, deadline_s=0.3),
        Check("bad", dies, (), {}, EVERYWHERE, closes_on_error=False),
        Check("disk", lambda s: [Finding("FAIL", "node", "full", "/", "0", "none")], (), {}),
        Check("slow", hangs, (), {}, EVERYWHERE, deadline_s=LONG_S),
        Check("late", dies, (), {}),
    ]
    report, replay = recorded(checks, tmp_path, 3.0)
    assert [f.check for f in report.findings[1:]] == [
        "mounts-hung",
        "bad-error",
        "full",
        "gate-deadline",
    ]
    same(report, replay.report())


def test_the_tree_holds_no_environment_but_slurms_and_is_closed_to_others(tmp_path: Path) -> None:
    os.environ["ROBUST_TEST_SECRET"] = "very secret"
    try:
        recorded([asks(tmp_path)], tmp_path)
    finally:
        del os.environ["ROBUST_TEST_SECRET"]
    tree = tmp_path / "tree"
    assert tree.stat().st_mode & 0o077 == 0
    for path in tree.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0
            assert b"very secret" not in path.read_bytes()
    assert json.loads((tree / "meta.json").read_text())["context"]["env"] == ENV


@pytest.mark.parametrize("what", ["full", "file", "link", "foreign"])
def test_a_directory_that_is_not_ours_and_empty_is_refused(tmp_path: Path, what: str) -> None:
    place = tmp_path / "tree"
    if what == "full":
        place.mkdir()
        (place / "x").touch()
    elif what == "file":
        place.touch()
    elif what == "link":
        (tmp_path / "real").mkdir()
        place.symlink_to(tmp_path / "real")
    else:
        if os.geteuid() != 0:
            pytest.skip("gives a directory away")
        place.mkdir()
        os.chown(place, 12345, 12345)
    with pytest.raises(ValueError, match="is not"):
        RecordingSystem(live((), tmp_path), str(place))


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    recorded((), tmp_path)
    assert (tmp_path / "tree/meta.json").exists()


# Trees built by hand.


def built(tmp_path: Path, files: dict[str, str], **more: Any) -> ReplaySystem:
    for path, text in files.items():
        place = tmp_path / "files" / path.strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for name, content in more.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / (name if name == "kmsg" else f"{name}.json")).write_text(text)
    return ReplaySystem(str(tmp_path), ALL)


def test_in_a_tree_built_by_hand_nearly_all_may_be_left_out(tmp_path: Path) -> None:
    system = built(tmp_path, {"/sys/class/net/eth0/mtu": "9000\n", "/sys/class/net/lo/mtu": "1\n"})
    assert system.names("/sys/class/net") == ["eth0", "lo"] and system.names("/") == ["sys"]
    assert system.read("/sys/class/net/eth0/mtu") == "9000\n"
    assert system.entry("/sys/class/net/eth0").kind == "dir"
    assert system.entry("/sys/class/net/eth0/mtu").kind == "file"
    system.probe("/sys/class", True, 1.0)
    assert system.kernel_log() == [] and system.history() == [] and system.fleet() == {}
    assert system.nvml()["error"] == "no-library" and system.clock_offset() == 0.0
    assert system.context.where == "prolog" and system.options("disk")
    for question in (
        lambda: system.read("/etc/passwd"),
        lambda: system.read("/sys/../../../etc/passwd"),
        lambda: system.names("/sys/class/none"),
        lambda: system.entry("/none"),
        lambda: system.link("/sys/class/net/eth0"),
        lambda: system.disk("/"),
        lambda: system.probe("/none", False, 1.0),
        lambda: system.command(["/bin/true"], 1.0),
    ):
        with pytest.raises(FileNotFoundError):
            question()
    with pytest.raises(NotADirectoryError):
        system.names("/sys/class/net/lo/mtu")
    with pytest.raises(IsADirectoryError):
        system.read("/sys/class")


def test_a_link_in_the_tree_does_not_lead_out_of_it(tmp_path: Path) -> None:
    system = built(tmp_path / "tree", {"/a/b": "in"})
    (tmp_path / "tree/files/out").symlink_to("/etc/passwd")
    (tmp_path / "tree/files/beside").symlink_to("a/b")
    assert system.read("/beside") == "in"
    with pytest.raises(FileNotFoundError):
        system.read("/out")


def test_meta_and_the_other_files_are_used(tmp_path: Path) -> None:
    system = built(
        tmp_path,
        {},
        meta={
            "context": {"where": "epilog", "node": "gpu1", "job": 3, "uid": 5},
            "now": 5.0,
            "uptime": 3.0,
            "boot_id": "b",
            "settings": {"gate": {"disabled": ["mounts"]}, "families": {"disk": {"nvme": 4}}},
        },
        kmsg="4,1,1000000,-;NVRM: hello\n",
        nvml={"stage": "done", "count": 0},
        fleet={"driver": ["1"]},
        calls={
            "disk": {"/": [10, 5, 0, 0, False]},
            "probe": {"/scratch write": {"errno": errno.ETIMEDOUT, "error": "no answer"}},
            "once": {"clock_offset": None},
        },
    )
    context = system.context
    assert (context.where, context.node, context.job, context.uid) == ("epilog", "gpu1", 3, 5)
    assert (system.now(), system.uptime(), system.boot_id()) == (5.0, 3.0, "b")
    assert system.options("disk")["nvme"] == 4
    assert system.kernel_log()[0].text == "NVRM: hello"
    assert system.nvml()["count"] == 0 and system.fleet() == {"driver": ["1"]}
    assert system.disk("/").total == 10 and system.clock_offset() is None
    with pytest.raises(TimeoutError, match="no answer"):
        system.probe("/scratch", True, 1.0)
    report = system.report()
    assert "mounts" in report.disabled and report.where == "epilog"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("meta.json", "{"),
        ("meta.json", "[]"),
        ("meta.json", '{"now": "late"}'),
        ("meta.json", '{"context": 3}'),
        ("meta.json", '{"settings": {"gate": 3}}'),
        ("calls.json", "[1]"),
    ],
)
def test_a_broken_tree_is_said_by_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(BadTree, match=name):
        ReplaySystem(str(tmp_path), ALL)


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTree, match="is not a directory"):
        ReplaySystem(str(tmp_path / "none"), ALL)
    with pytest.raises(BadTree, match="not a recording"):
        ReplaySystem(str(tmp_path), ALL)


@pytest.mark.parametrize("outcome", [3, {"status": "FAIL"}, {"status": "X", "findings": [{}]}])
def test_broken_outcomes_are_a_broken_tree(tmp_path: Path, outcome: object) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"outcomes": {"disk": outcome}}))
    with pytest.raises(BadTree):
        ReplaySystem(str(tmp_path), ALL).report()
