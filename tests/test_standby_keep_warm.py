"""robust-standby warm: files read on idle standbys."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from standby_site import LOW, Site, sight

from robust_slurm.slurm import Completed
from standby.pool import keep_warm, preread
from standby.pool.members import Wish


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_preread_reads_files_and_keeps_its_bounds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3000)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b").write_bytes(b"y" * 2000)
    (tmp_path / "link").symlink_to("/dev/zero")
    found = preread.preread([str(tmp_path)], 1 << 20, 60.0)
    assert (found["files"], found["bytes"], found["all"], found["errors"]) == (2, 5000, True, [])
    found = preread.preread([str(tmp_path)], 3500, 60.0)
    assert found["bytes"] == 3500 and not found["all"]
    assert preread.preread([str(tmp_path)], 1 << 20, 0.0)["bytes"] == 0
    found = preread.preread([str(tmp_path / "none"), "/dev/null"], 1 << 20, 60.0)
    assert found["files"] == 0 and not found["all"] and len(found["errors"]) == 2
    assert preread.room() > 1 << 20


def test_a_directory_that_cannot_be_read_counts_as_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "below").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("below"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    found = preread.preread([str(tmp_path)], 1 << 20, 60.0)
    assert found["files"] == 1 and not found["all"]
    assert found["errors"] == [f"{tmp_path}/below: Permission denied"]


@pytest.mark.parametrize(
    ("answer", "text", "well"),
    [
        ('{"files": 2, "bytes": 3e9, "seconds": 1, "all": true, "errors": []}', "3.00 GB", True),
        ('{"files": 2, "bytes": 3, "seconds": 1, "all": false, "errors": []}', "is more", True),
        ('{"files": 0, "bytes": 0, "seconds": 1, "all": false, "errors": ["no"]}', "; no", False),
        ("", "no answer", False),
        ("[]", "no answer", False),
        ('{"files": "\\u001b[2J", "bytes": 3, "seconds": 1, "all": true, "errors": []}',
         "no answer", False),
        # Names of files are anybody's: escapes, and bytes that are no UTF-8.
        ('{"files": 1, "bytes": 3, "seconds": 1, "all": false, "errors": '
         '["/d/\\u001b]0;x\\u0007\\udc80: no"]}', "; /d/?]0;x??: no", False),
    ],
)  # fmt: skip
def test_answers_of_preread(answer: str, text: str, well: bool) -> None:
    said, good = keep_warm.told(answer)
    assert text in said and good is well and said.isprintable()


def test_only_idle_standbys_are_warmed() -> None:
    wish = Wish("standby", ("s1", "s2", "s3"), 3, backfill="low")
    seen = sight("s1 s2/IDLE+DRAIN s3 s4", {1: LOW}, standby="s[1-3]")
    assert keep_warm.idle(wish, seen) == ["s3"]
    words = keep_warm.argv("low", "s3", "/p", ["/data"], 0, 45.0)
    assert "--partition=low" in words and "--time=2" in words and words[-1] == "/data"


def test_warm_runs_our_own_python_where_jobs_make_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dict(site.slurm.config)
    site.slurm.preempt()
    site.apply("--nodes", "s[1-3]", "--size", "1", "--backfill", "low")
    ran: list[list[str]] = []

    def run(words: list[str], *_: Any) -> Completed:
        ran.append(words)
        answer = {"files": 1, "bytes": 3, "seconds": 1, "all": True, "errors": []}
        return Completed(0, json.dumps(answer), "")

    monkeypatch.setattr(keep_warm, "run_command", run)
    monkeypatch.setenv("ROBUST_TASK_PYTHON", "/home/ada/python")
    code, text = site.run("warm", "/data")
    assert code == 0 and "s1  read 1 files" in text and "note" not in text
    site.slurm.config = config  # jobs of low make no way any more
    code, text = site.run("warm", "/data")
    assert code == 0 and "a companion waits for these jobs" in text
    assert [words[2] for words in ran] == ["--partition=low", "--partition=standby"]
    assert all(sys.executable in words and "/home/ada/python" not in words for words in ran)
