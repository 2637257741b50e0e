"""The epilog spares what Slurm did not start: logins and services, on recorded /proc trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from isolated import isolated
from job_leftovers import UID, clear, running, sleeper

from health.leftovers import processes

SLURMD = "/system.slice/slurmd.service"
SESSION = f"/user.slice/user-{UID}.slice/session-7.scope"
MANAGER = f"/user.slice/user-{UID}.slice/user@{UID}.service"
STEP = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"


class Row(NamedTuple):
    """One process of a recorded tree; ``job``: in its environment."""

    pid: int
    parent: int
    uid: int
    name: str
    unit: str
    job: int = 0


SYSTEMD = [
    Row(1, 0, 0, "systemd", "/init.scope"),
    Row(10, 1, 0, "slurmd", SLURMD),
    Row(11, 1, 0, "sshd", "/system.slice/ssh.service"),
    Row(12, 11, 0, "sshd", SESSION),
    Row(13, 12, UID, "sshd", SESSION),  # its half without privileges
    Row(14, 13, UID, "bash", SESSION),
    Row(15, 14, UID, "bash", SESSION, job=7),  # a shell of salloc in that login
    Row(16, 1, UID, "tmux: server", SESSION),
    Row(17, 1, UID, "systemd", MANAGER + "/init.scope"),
    Row(18, 17, UID, "dbus-daemon", MANAGER + "/app.slice/dbus.service"),
    Row(19, 1, UID, "node_exporter", "/system.slice/node_exporter.service"),
    Row(20, 1, 0, "containerd-shim", "/system.slice/containerd.service"),
    Row(21, 20, UID, "postgres", "/system.slice/docker-1f.scope"),
    Row(22, 1, 0, "crond", "/system.slice/crond.service"),
    Row(23, 22, UID, "backup", "/system.slice/crond.service"),
    # what jobs left
    Row(40, 1, UID, "python", STEP.format(7), job=7),
    Row(41, 1, UID, "python", SLURMD, job=7),  # without cgroups of Slurm's
    Row(42, 1, UID, "python", SLURMD),
    Row(43, 42, UID, "python", SLURMD),
    Row(44, 17, UID, "python", MANAGER + "/app.slice/run-1.scope", job=7),  # systemd-run --user
    Row(45, 1, UID, "python", STEP.format(6), job=6),
]
# A node without systemd, a container: all is in one cgroup.
PLAIN = [
    Row(1, 0, 0, "init", "/"),
    Row(10, 1, 0, "slurmd", "/"),
    Row(11, 1, 0, "sshd", "/"),
    Row(12, 11, UID, "sshd", "/"),
    Row(13, 12, UID, "bash", "/"),
    Row(14, 0, UID, "bash", "/"),  # docker exec, nsenter
    Row(15, 14, UID, "top", "/", job=7),
    Row(16, 1, UID, "node_exporter", "/"),  # like a daemon of a job's: only "job" can tell
    Row(40, 1, UID, "python", "/", job=7),
    Row(41, 10, UID, "python", "/", job=7),
]


@pytest.mark.parametrize(
    ("tree", "mode", "slurmd", "ended"),
    [
        (SYSTEMD, "job", SLURMD, [40, 41, 44]),
        (SYSTEMD, "user", SLURMD, [40, 41, 42, 43, 44, 45]),
        # Started by hand from somebody's ssh: that is no place of Slurm's.
        (SYSTEMD, "user", f"{SESSION}/x", [40, 44, 45]),
        (PLAIN, "job", "/", [40, 41]),
        (PLAIN, "user", "/", [16, 40, 41]),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_only_what_slurm_started(
    tree: list[Row],
    mode: str,
    slurmd: str,
    ended: list[int],
    version: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(tmp_path, tree, version)
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    found = processes.scan(UID)
    left = processes.leftovers(found, 7, UID, mode, True, slurmd)
    assert sorted(p.pid for p in left) == ended


def record(top: Path, tree: list[Row], version: int) -> None:
    """The files of /proc; ``version``: of the cgroups."""
    for row in tree:
        place = top / str(row.pid)
        place.mkdir()
        rest = " ".join(["0"] * 17)
        stat = f"{row.pid} ({row.name}) S {row.parent} {rest} {row.pid * 10} 0\n"
        (place / "stat").write_text(stat)
        (place / "status").write_text(f"Name:\t{row.name}\nUid:\t{row.uid}\t{row.uid}\n")
        environ = f"PATH=/bin\0SLURM_JOB_ID={row.job}\0" if row.job else "PATH=/bin\0"
        (place / "environ").write_text(environ)
        (place / "cmdline").write_text(f"{row.name}\0")
        text = f"0::{row.unit}\n"
        if version == 1:
            text = f"9:freezer:/\n1:name=systemd:{row.unit}\n0::/\n"
        (place / "cgroup").write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/ssh.service\n", "/system.slice/ssh.service"),
        ("2:cpu,cpuacct:/x\n1:name=systemd:/init.scope\n0::/\n", "/init.scope"),
        ("4:memory:/a\n", "/"),
        ("", "/"),
    ],
)
def test_unit_of(cgroup: str, unit: str) -> None:
    assert processes.unit_of(cgroup) == unit


@isolated
def test_what_another_program_of_root_started_stays() -> None:
    """A shell whose parent is root's, as sshd is, stays in the mode "user" as well."""
    code = (
        f"import subprocess; subprocess.Popen(['/bin/sleep', '600'], user={UID}, group={UID}, "
        "env={'SLURM_JOB_ID': '7'}); print(1, flush=True); input()"
    )
    sshd = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert sshd.stdout is not None and sshd.stdout.readline()
    mine = sleeper()
    assert clear().ended == 1
    assert running(mine) == [False]
    assert len([p for p in processes.scan(UID) if p.uid == UID and p.state not in "ZX"]) == 1
