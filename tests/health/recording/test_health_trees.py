"""robust-health record and replay: a node in a tree, and trees that cannot be replayed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import health_site
import pytest
from health_site import finds
from places import REPOSITORY

from health import cli, commands
from health.check import Check
from health.checks import ALL
from health.finding import Finding
from health.recording import tree

site, recorded = health_site.site, health_site.recorded


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
    error = json.loads(told.out)["error"]
    assert said in f"{error['message']}; {error['hint']}" and error["exit_code"] == 2
    assert told.err == ""


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

    monkeypatch.setattr("health.recording.replay.open", refuse, raising=False)
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
    monkeypatch.setattr("health.recording.record.os.open", full_open)
    monkeypatch.setattr("health.recording.record.os.write", full_write)
    assert cli.main(["record", str(tmp_path / "tree")]) == 1
    told = capsys.readouterr()
    assert "tree: No space left on device; the recording is incomplete" in told.err
    assert told.out == ""
    assert any(p.name.startswith(tree.UNFINISHED) for p in (tmp_path / "tree").iterdir())
    assert cli.main(["replay", str(tmp_path / "tree")]) == 2
