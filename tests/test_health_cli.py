"""robust-health: what it prints, its exit codes, and what it says to bad input."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from health import baseline, checks, cli, commands, history, nvml, show, tree
from health.check import Check
from health.checks import ALL, FAMILIES
from health.child import write_all
from health.finding import Finding
from health.report import Ran, Report
from health.verdict import Verdict
from health.xid_catalog import SXIDS, XIDS
from tests.fake_host import CHECKS, healthy, ids, interface, port

REPOSITORY = Path(__file__).parents[1]
GPU = {
    "index": 3,
    "pci": "0000:3b:00.0",
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00",
    "clocks": {"max_sm": 1980, "max_memory": 2619},
    "pcie": {"generation": 1, "max_generation": 5, "width": 8, "max_width": 16},
    "nvlinks": [{"link": 0, "active": True}, {"link": 1, "active": False}],
    "errors": {},
}


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a site, a spool and a state directory of this test's own; no GPU driver."""
    for name in ("spool", "state/nodes"):
        (tmp_path / name).mkdir(parents=True)
    path = tmp_path / "robust.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n[gate]\nspool = "{tmp_path}/spool"\n')
    monkeypatch.setenv("ROBUST_SITE_CONFIG", str(path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return path


def gpus(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any]) -> None:
    def collect(fd: int, needed: object) -> None:
        for line in (
            ["top", {"driver": "570.1", "count": len(devices)}],
            *(["device", device] for device in devices),
            ["stage", "done"],
        ):
            write_all(fd, json.dumps(line).encode() + b"\n")

    monkeypatch.setattr(nvml, "_collect", collect)


def finds(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    mine = Check("disk", lambda system: list(findings), (), {})
    monkeypatch.setattr(commands, "ALL", (mine,))


def test_an_open_node_is_0_and_a_closed_one_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch)
    assert cli.main(["check"]) == 0
    assert "PASS: open" in capsys.readouterr().out
    finds(monkeypatch, Finding("FAIL", "node", "disk-full", "/", "0 GiB", "reboot"))
    assert cli.main(["check", "--where", "prolog"]) == 1
    out = capsys.readouterr().out
    assert "n1, prolog" in out and "disk-full / (node) -> reboot" in out and "0 GiB" in out
    assert "reason: robust:node:disk-full:/:reboot:job0" in out and "\x1b" not in out


def test_json_has_every_family_with_its_milliseconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, Finding("FAIL", "node", "disk-full", "/", "0 GiB", "none"))
    assert cli.main(["check", "--json", "--node", "gpu7"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert out["node"] == "gpu7" and out["verdict"]["closed"] is True
    assert [(row["family"], row["status"]) for row in out["ran"]] == [("disk", "FAIL")]
    assert out["ran"][0]["ms"] >= 0 and out["total_ms"] > 0


def test_record_and_replay_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, Finding("FAIL", "node", "disk-full", "/", "0 GiB", "none"))
    assert cli.main(["record", str(tmp_path / "tree")]) == 0
    assert "serial numbers" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "tree"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["reason"].startswith("robust:node:disk")
    assert cli.main(["record", str(tmp_path / "tree")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--where", "nowhere"], "use one of prolog, epilog, sweep, deep"),
        (["check", "--only", "mount"], "no such family; did you mean mounts?"),
        (["check", "--only", "qqqq"], "see robust-health list"),
        (["check", "--only", "nvlink,gpu"], "did you mean gpu_count or gpu_recovery"),
        (["check", "--config", "/proc"], "--config /proc: not a file"),
        (["check", "--config", "/nowhere/robust.toml"], "no such file"),
        (["record", "/proc/tree"], "/proc/tree"),
        (["record", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory; name a"),
        (["record", "/proc/self/status"], "is not a directory of ours"),
        (["replay", "/proc/self/status"], "is not a directory"),
        (["replay", "/nowhere"], "is not a directory"),
        (["replay", "/proc/self/fd"], "not a recording"),
        (["explain", "mountz"], "did you mean mounts"),
        (["explain", "qqqqqq"], "`robust-health list` shows all"),
        (["explain", "xid", "99999"], "Xid 99999: not in the catalogue"),
        (["explain", "sxid99999"], "SXid 99999: not in the catalogue"),
        (["repaired", "--reset", "gpu9"], "NVML shows no GPU"),
        (["baseline"], "NVML tells of no GPU here"),
    ],
)
def test_bad_input_is_2_and_says_what_to_do(
    words: Sequence[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and err.startswith(f"robust-health {words[0]}")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["check", "--nonsense"], ["replay"]])
def test_a_wrong_command_line_is_2(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2 and "usage:" in capsys.readouterr().err


def test_a_family_that_does_not_run_there_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Check("disk", lambda system: [], (), {}, frozenset({"sweep", "deep"}))
    monkeypatch.setattr(commands, "ALL", (mine,))
    assert cli.main(["check", "--where", "prolog", "--only", "disk"]) == 2
    assert "it runs in sweep, deep" in capsys.readouterr().err


def test_list_names_every_family_and_condition(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in rows] == [check.name for check in ALL]
    for check in ALL:
        assert f"\n{check.name} " in f"\n{text}"
        for condition in check.conditions:
            assert condition.check in text


@pytest.mark.parametrize("topic", ["79", "xid79", "Xid 79", "xid-79", "XID79"])
def test_an_xid_is_explained(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *topic.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Xid 79 (") and "action here: reboot" in out


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("mounts-hung", "did not end within its deadline"),
        ("gpu-count-error", "The check itself failed"),
        ("gate-deadline", "the time for all checks"),
        ("gate-crashed", "the gate itself broke"),
        ("config-unusable", "cannot be used"),
        ("sxid10003", "SXid 10003 (NVSwitch)"),
        ("10003", "SXid 10003 (NVSwitch)"),
    ],
)
def test_what_has_no_page_of_its_own_is_explained(
    topic: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", topic]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_every_family_and_condition_is_explained(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", check.name]) == 0
    page = capsys.readouterr().out
    assert page.startswith("#")
    for condition in check.conditions:
        if any(c.isdigit() for c in condition.check.partition("-")[2]):
            continue  # "xid-79" is explained as an Xid
        assert cli.main(["explain", condition.check]) == 0
        assert condition.when in capsys.readouterr().out


def test_every_xid_and_sxid_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for code, row in XIDS.items():
        assert cli.main(["explain", str(code)]) == 0
        assert f"Xid {code} ({row[0]}): {row[1]}" in capsys.readouterr().out
    for code, (kind, _, meaning) in SXIDS.items():
        assert cli.main(["explain", f"sxid{code}"]) == 0
        out = capsys.readouterr().out
        assert f"SXid {code} (NVSwitch): {meaning}" in out and f"kind: {kind}" in out


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_what_the_runner_finds_in_a_family_is_explained(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("hung", "error", "many"):
        for word in (f"{check.name}-{suffix}", f"{check.name}-{suffix}".replace("_", "-")):
            assert cli.main(["explain", word]) == 0
            assert f"# {check.name}" in capsys.readouterr().out


def test_a_page_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("health.explain.PAGES", tmp_path)
    assert cli.main(["explain", "disk"]) == 0
    assert "disk.md cannot be read: No such file" in capsys.readouterr().out


# Trees.


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A tree of a healthy node."""
    gpus(monkeypatch, GPU)
    finds(monkeypatch)
    assert cli.main(["record", str(tmp_path / "tree")]) == 0
    capsys.readouterr()
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("meta.json", "{", "meta.json: "),
        ("meta.json", '{"format": 2}', "format 2, this robust-health reads 1"),
        ("meta.json", '{"context": {"where": "dream"}}', "where is 'dream', want one of deep"),
        ("calls.json", '{"disk": 3}', "calls.json: disk is not a JSON object"),
        ("nvml.json", "[1]", "nvml.json: not a JSON object"),
        ("nvml.json", '{"devices": {"0": 1}}', "devices is not a list of JSON objects"),
        ("fleet.json", "{", "fleet.json: "),
        ("unfinished", "", "the recording was not finished; record the node again"),
        ("unfinished-28", "", "not finished (No space left on device)"),
    ],
)
def test_a_tree_that_cannot_be_replayed_is_2_and_named(
    name: str, text: str, said: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / name).write_text(text)
    assert cli.main(["replay", str(recorded), "--json"]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize(
    ("kind", "answer", "asked"),
    [
        ("disk", {"/": [1, 2]}, lambda s: s.disk("/")),
        ("entry", {"/": "dir"}, lambda s: s.entry("/")),
        ("command", {"/bin/x": 1}, lambda s: s.command(["/bin/x"], 1.0)),
        ("names", {"/": 7}, lambda s: s.names("/")),
    ],
)
def test_a_broken_answer_is_the_trees_trouble_not_the_nodes(
    kind: str, answer: Any, asked: Any, recorded: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    calls = json.loads((recorded / "calls.json").read_text())
    (recorded / "calls.json").write_text(json.dumps({**calls, kind: answer}))
    monkeypatch.setattr(commands, "ALL", (Check("disk", asked, (), {}),))
    assert cli.main(["replay", str(recorded)]) == 2
    assert "calls.json" in capsys.readouterr().err


def test_a_file_of_the_tree_that_cannot_be_read_is_the_trees_trouble(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Any, *args: Any, **more: Any) -> Any:
        if str(path).endswith("/files/etc/fstab"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *args, **more)

    monkeypatch.setattr("health.replay.open", refuse, raising=False)
    mine = Check("mounts", lambda s: list(s.read("/etc/fstab")), (), {})
    monkeypatch.setattr(commands, "ALL", (mine,))
    assert cli.main(["replay", str(recorded)]) == 2
    assert "files/etc/fstab: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_an_error_closes_the_gate_where_the_page_says_so(
    check: Check, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(system: Any) -> list[Finding]:
        raise RuntimeError("broken")

    page = (REPOSITORY / "docs/checks/README.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{check.name}]("))
    monkeypatch.setattr(commands, "ALL", (check._replace(run=broken),))
    assert cli.main(["replay", str(recorded)]) == int("**yes**" in row)


def test_settings_of_another_version_are_told_and_not_used(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = json.loads((recorded / "meta.json").read_text())
    meta["settings"]["gate"] |= {"newer": 1, "prolog_deadline": "soon"}
    meta["settings"]["families"] = {"telepathy": {}}
    (recorded / "meta.json").write_text(json.dumps(meta))
    assert cli.main(["replay", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "config-unusable" in out and "[gate] newer is not known" in out
    assert "prolog_deadline = 'soon': not a number" in out and "family telepathy" in out


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_full_disk_while_recording_is_1_and_no_tree(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check that asked hears nothing of it; the tree is refused afterwards."""

    def look(system: Any) -> list[Finding]:
        system.entry("/")
        assert system.read("/proc/uptime")
        return []

    real_open, real_write = os.open, os.write

    def full_open(path: Any, *args: Any, **more: Any) -> int:
        if call == "open" and str(path).endswith("/calls.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(path, *args, **more)

    def full_write(fd: int, data: bytes) -> int:
        return 1 if call == "write" and data.startswith(b'["entry"') else real_write(fd, data)

    monkeypatch.setattr(commands, "ALL", (Check("disk", look, (), {}),))
    monkeypatch.setattr("health.record.os.open", full_open)
    monkeypatch.setattr("health.record.os.write", full_write)
    assert cli.main(["record", str(tmp_path / "tree")]) == 1
    told = capsys.readouterr()
    assert "tree: No space left on device; the tree is not complete" in told.err
    assert told.out == ""
    assert any(p.name.startswith(tree.UNFINISHED) for p in (tmp_path / "tree").iterdir())
    assert cli.main(["replay", str(tmp_path / "tree")]) == 2


def test_every_family_can_be_imported() -> None:
    broken = [check.name for check in ALL if not check.conditions]
    assert broken == [] and [check.name for check in ALL] == list(FAMILIES)
    ids = [condition.check for check in ALL for condition in check.conditions]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("fault", [ModuleNotFoundError, SyntaxError, TypeError])
def test_a_family_that_cannot_be_imported_keeps_the_gate_closed(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> ModuleType:
        raise fault("broken")

    monkeypatch.setattr(checks, "import_module", broken)
    monkeypatch.setattr(commands, "ALL", (checks.load("disk"),))
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "disk-error" in out and "cannot be imported" in out


def test_a_person_says_that_the_node_was_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["repaired", "--note", "new DIMM"]) == 0
    assert "repair recorded" in capsys.readouterr().out
    (event,) = history.load(str(tmp_path / "spool"))
    assert event.kind == "repaired" and event.data["note"] == "new DIMM"
    assert (tmp_path / "state/nodes/n1.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("gpu", "pci"),
    [
        ("gpu3", "0000:3b:00.0"),
        ("3", "0000:3b:00.0"),
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("all", ""),
    ],
)
def test_a_person_says_that_a_gpu_was_reset(
    gpu: str, pci: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, GPU)
    assert cli.main(["repaired", "--reset", gpu]) == 0
    (event,) = history.load(str(tmp_path / "spool"))
    assert event.kind == "reset" and event.data["gpu"] == pci


def test_what_cannot_be_recorded_is_1(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write_text(f'[gate]\nspool = "{site}/none"\n')
    assert cli.main(["repaired"]) == 1
    assert "not fully recorded" in capsys.readouterr().err


def test_the_baseline_is_this_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(
        monkeypatch,
        GPU,
        {**GPU, "index": 4, "nvlinks": [], "pcie": {"max_generation": 4, "width": 4}},
    )
    assert cli.main(["baseline"]) == 0
    model = GPU["name"]
    expected = {
        "driver": ["570.1"],
        "vbios": {model: ["96.00"]},
        "max_clocks": {model: {"sm": 1980, "memory": 2619}},
        "pcie": {model: {"generation": 5, "width": 8}},  # in use, of the best of them
        "nvlinks": {model: 1},
    }
    for place in ("spool", "state/nodes"):
        assert json.loads((tmp_path / place / "fleet.json").read_text()) == expected
    gpus(monkeypatch, {**GPU, "vbios": "97.00"})
    assert cli.main(["baseline", "--add", "--host"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    assert found["vbios"] == {model: ["96.00", "97.00"]} and found["driver"] == ["570.1"]
    assert found["memory"] > 0 and found["nvme"] >= 0
    assert isinstance(found["infiniband"], dict) and isinstance(found["ethernet"], dict)
    assert cli.main(["baseline"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    assert found["vbios"] == {model: ["97.00"]}


def test_a_host_is_recorded_as_the_checks_read_it() -> None:
    """And the node that it was recorded from passes them."""
    down = port("mlx5_8", "1: DOWN") | port("mlx5_9", "2: INIT", physical="5: LinkUp")
    node = healthy(more=down)
    found = baseline.observe(node, True)
    assert found["memory"] == 2113560000 and found["nvme"] == 1
    assert found["infiniband"] == {
        f"mlx5_{i}": {"rate": 400.0, "firmware": ["28.39.1002"]} for i in range(8)
    }
    assert found["ethernet"] == {"bond0": 200000}  # of the default route
    again = healthy(more=down, fleet=found)
    for check in CHECKS:
        assert check.run(again) == [], check.name
    slower = healthy(
        more=interface("bond0", speed="100000", bonding__slaves="eth0 eth1\n")
        | port("mlx5_3", rate="200 Gb/sec (4X HDR)")
        | port("mlx5_4", "1: DOWN"),
        fleet=found,
    )
    assert ids([f for check in CHECKS for f in check.run(slower)]) == [
        ("FAIL", "ethernet-slow", "bond0"),
        ("FAIL", "ib-rate", "mlx5_3"),
        ("FAIL", "ib-down", "mlx5_4"),
    ]


def test_without_gpus_only_the_host_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch)
    assert cli.main(["baseline"]) == 2
    assert "--host records the rest of a node" in capsys.readouterr().err
    assert cli.main(["baseline", "--host"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    assert set(found) == {"memory", "nvme", "infiniband", "ethernet"}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda spool: (spool / "fleet.json").write_text("{"), "fleet.json: "),
        (lambda spool: (spool / "fleet.json").write_text("[]"), "is not a JSON object"),
        (lambda spool: spool.chmod(0o777), "can be written by others"),
    ],
)
def test_a_baseline_that_cannot_be_written_is_1(
    spoil: Any, said: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    site.write_text(f'[gate]\nspool = "{tmp_path}/spool"\n')
    gpus(monkeypatch, GPU)
    spoil(tmp_path / "spool")
    assert cli.main(["baseline"]) == 1
    err = capsys.readouterr().err
    assert said in err and "not recorded" in err and "Traceback" not in err


def test_a_state_directory_that_is_not_mounted_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state/nodes").rmdir()
    gpus(monkeypatch, GPU)
    assert cli.main(["baseline"]) == 2
    assert "state/nodes" in capsys.readouterr().err
    assert not (tmp_path / "state/nodes").exists()


@pytest.mark.parametrize(
    ("known", "found", "add", "merged"),
    [
        ({}, {"a": [1]}, False, {"a": [1]}),
        ({"a": [1]}, {"a": [2]}, False, {"a": [2]}),
        ({"a": [1]}, {"a": [2, 1]}, True, {"a": [1, 2]}),
        ({"a": {"m": [1], "n": [1]}}, {"a": {"m": [2]}}, False, {"a": {"m": [2], "n": [1]}}),
        ({"a": 3, "b": 4}, {"a": 5}, True, {"a": 5, "b": 4}),
        ({"a": "odd"}, {"a": {"m": 1}}, False, {"a": {"m": 1}}),
        ({"ethernet": {"a": 1}}, {"ethernet": {"b": 2}}, False, {"ethernet": {"b": 2}}),
        ({"ethernet": {"a": 1}}, {"ethernet": {"b": 2}}, True, {"ethernet": {"a": 1, "b": 2}}),
    ],
)
def test_merging(
    known: dict[str, Any], found: dict[str, Any], add: bool, merged: dict[str, Any]
) -> None:
    assert baseline.merge(known, found, add) == merged


def test_colours_only_where_they_are_wanted() -> None:
    finding = Finding("WARN", "tool", "config-unusable", "", "bad key", "none")
    report = Report(
        "n1",
        "deep",
        5,
        0.0,
        [finding, finding._replace(check="xid-79", device="gpu3")],
        [Ran("xid", 1.0, "WARN"), Ran("disk", 0.0, "disabled")],
        2.0,
        ["disk"],
        [],
    )
    plain = show.table(report, Verdict(False, (), ""), False)
    coloured = show.table(report, Verdict(False, (), ""), True)
    assert "\x1b" not in plain and "\x1b[33mWARN" in coloured
    assert plain.index("config-unusable") < plain.index("ms  xid") < plain.index("xid-79")
    assert "switched off by the site: disk" in plain and "job 5" in plain


def test_the_sweep_gets_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ModuleType("health.sweep")
    heard: list[list[str]] = []
    sweep.main = lambda words: heard.append(words) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "health.sweep", sweep)
    monkeypatch.setattr("health.sweep", sweep, raising=False)
    assert cli.main(["sweep", "--dry-run"]) == 1
    assert heard == [["--dry-run"]]


def test_a_person_who_is_not_root_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(system: Any) -> list[Finding]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    monkeypatch.setattr(commands, "ALL", (Check("xid", closed, (), {}),))
    monkeypatch.setattr(commands.os, "geteuid", lambda: 1000)
    assert cli.main(["check"]) == 1
    assert "not root" in (err := capsys.readouterr().err) and "xid-error" in err
