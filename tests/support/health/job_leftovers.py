"""Leftovers of two users' jobs on a node, for tests of the epilog's clean-up."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from health.leftovers import cleanup
from health.leftovers.processes import Process

UID, OTHER = 20001, 20002


def proc(pid: int, uid: int = UID, **more: Any) -> Process:
    return Process(pid, 1, uid, pid * 10, "S", "python", **more)._replace(
        **{k: v for k, v in more.items() if k in Process._fields}
    )


def run(*argv: str, uid: int = UID, env: dict[str, str] | None = None, **more: Any) -> Any:
    """A process as a job has it: slurmd is above it."""
    Path("/proc/self/comm").write_text("slurmd")
    return subprocess.Popen(argv, user=uid, group=uid, env=env or {}, cwd="/", **more)


def sleeper(uid: int = UID, **env: str) -> subprocess.Popen[bytes]:
    return run("/bin/sleep", "600", uid=uid, env=env)  # type: ignore[no-any-return]


def stubborn(uid: int = UID) -> subprocess.Popen[bytes]:
    """Takes no SIGTERM."""
    process = run(
        "/bin/sh",
        "-c",
        'trap "" TERM; echo on; while :; do sleep 1; done',
        uid=uid,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"on\n"
    return process  # type: ignore[no-any-return]


def stepd(tmp_path: Path, job: int) -> subprocess.Popen[bytes]:
    program = tmp_path / "slurmstepd"
    if not program.exists():
        shutil.copy("/bin/sleep", program)
    return subprocess.Popen([f"slurmstepd: [{job}.batch]", "600"], executable=program)


def clear(mode: str = "user", job: int = 7, uid: int = UID, **more: Any) -> cleanup.Cleared:
    given = {"steps": [], "dirs": [], "deadline_s": 10.0} | more
    return cleanup.clear(job, uid, mode, **given)


def running(*them: subprocess.Popen[bytes]) -> list[bool]:
    return [process.poll() is None for process in them]


def own(path: Path, uid: int = UID) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def make(path: Path, uid: int = UID, text: str = "x") -> Path:
    path.write_text(text)
    return own(path, uid)


def make_dir(path: Path, uid: int = UID) -> Path:
    path.mkdir()
    return own(path, uid)


def wait_old_enough(*changed: float) -> None:
    """Wait until what changed then (wall clock, s) is clearly older than a look that is to come."""
    until(lambda: time.time() - cleanup._CLOCK_S > max(changed), "what is old enough", 10, 0.005)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
