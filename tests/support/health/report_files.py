"""Accusations in the directories of a job, as robust-srun writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from health.history.node_reports import ReportingJob, ReportsFound, find

UID = 20001 if os.geteuid() == 0 else os.geteuid()
JOB = ReportingJob(job=7, uid=UID, gid=UID, of=7)
NAME = "n1.e3.json"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
RECORD: dict[str, Any] = {
    "v": 1,
    "node": "n1",
    "incident": "e3",
    "job": 7,
    "user": "trainer",
    "time": 1795253932.5,
    "symptom": "node_lost",
    "evidence": ["no report for 6.0 s", "connection closed"],
}


def raw(**changes: Any) -> bytes:
    return json.dumps(RECORD | changes).encode()


class ReportFiles:
    """The state directory of job 7 in which its user leaves accusations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dir = path / "jobs" / "7" / "accusations"
        self.dir.mkdir(parents=True)
        for made in (path, path.parent):
            made.chmod(0o755)
        (path / "jobs").chmod(0o1777)
        self.own(self.dir.parent, self.dir)

    def own(self, *paths: Path, uid: int = UID) -> None:
        for path in paths:
            os.chown(path, uid, uid, follow_symlinks=False)

    def write(self, name: str, content: bytes, uid: int = UID) -> Path:
        path = self.dir / name
        path.write_bytes(content)
        path.chmod(0o644)
        self.own(path, uid=uid)
        return path

    def find(self, job: ReportingJob = JOB, known: tuple[str, ...] = ()) -> ReportsFound:
        found, error = find(str(self.path), "n1", job, known, 10.0)
        assert error == ""
        return found


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ReportFiles]:
    open_to_all = [
        p for p in tmp_path.parents if p.stat().st_uid == os.geteuid() and p != Path("/")
    ]
    for above in open_to_all:  # pytest keeps its directories to root
        if "pytest" in above.name:
            above.chmod(0o755)
    yield ReportFiles(tmp_path / "state")
