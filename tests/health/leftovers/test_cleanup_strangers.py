"""The epilog spares what Slurm did not start: logins and services, on recorded /proc trees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from isolated import isolated
from job_leftovers import UID, clear, running, sleeper

from health.leftovers import processes
from lab import linux

SLURMD = "/system.slice/slurmd.service"
SESSION = f"/user.slice/user-{UID}.slice/session-7.scope"
MANAGER = f"/user.slice/user-{UID}.slice/user@{UID}.service"
STEP = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"


# As Slurm 26.05 names them, with several slurmds on a host.
SCOPE = "/system.slice/n1_slurmstepd.scope"
MINE, RUNS, OVER = "s1X1M8HJD3FG00", "s1X1M8HJD3FG01", "s1X1M8HJD3FG02"


class Row(NamedTuple):
    """One process of a recorded tree; ``job``: in its environment; ``title``: its arguments."""

    pid: int
    parent: int
    uid: int
    name: str
    unit: str
    job: int = 0
    title: str = ""


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


BY_SLUID = [
    Row(1, 0, 0, "systemd", "/init.scope"),
    Row(10, 1, 0, "slurmd", SLURMD),
    Row(11, 10, 0, "slurmstepd", f"{SCOPE}/{RUNS}/step_0/slurm", title="slurmstepd: [8.0]"),
    # What a user runs may call itself so; here the kernel's word is that it is a task.
    Row(12, 11, 0, "slurmstepd", f"{SCOPE}/{RUNS}/step_0/user/task_0", title="slurmstepd: [7.0]"),
    Row(40, 1, UID, "python", f"{SCOPE}/{MINE}/step_0/user/task_0"),
    Row(41, 1, UID, "python", f"{SCOPE}/{MINE}/step_0/user/task_0", job=8),
    Row(42, 11, UID, "python", f"{SCOPE}/{RUNS}/step_0/user/task_0", job=7),
    Row(43, 1, UID, "python", f"{SCOPE}/{OVER}/step_0/user/task_0", job=7),
    Row(44, 1, UID, "python", f"{MANAGER}/{MINE}/step_0", job=8),
]


@pytest.mark.parametrize(
    ("mode", "alone", "ended"),
    [
        ("job", False, [40, 41]),
        # The user has no other job here, so what is in a cgroup of none of those is a leftover.
        ("job", True, [40, 41, 43]),
        ("user", True, [40, 41, 42, 43]),
    ],
)
def test_jobs_named_by_sluid(
    mode: str, alone: bool, ended: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, BY_SLUID, 2)
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    found = processes.scan(UID, {MINE: 7})
    assert {p.pid: p.job for p in found if p.job} == {40: 7, 41: 7, 42: 8, 43: -1}
    assert processes.others(found, [], 7, UID)
    left = processes.leftovers(found, 7, UID, mode, alone, SLURMD)
    assert sorted(p.pid for p in left) == ended


@isolated
def test_the_epilog_ends_what_is_in_the_cgroup_of_its_jobs_sluid() -> None:
    """The processes are real, and say nothing of a job; their cgroups are files."""
    mine, stays = sleeper(), sleeper()
    for process, sluid in ((mine, MINE), (stays, OVER)):
        text = Path(f"/tmp/cgroup-{process.pid}")
        text.write_text(f"0::{SCOPE}/{sluid}/step_0/user/task_0\n")
        linux.mount(str(text), f"/proc/{process.pid}/cgroup", "", linux.MS_BIND)
    assert clear("job", sluids={MINE: 7}).ended == 1  # the other SLUID is another job's
    assert running(mine, stays) == [False, True]
    assert clear("job", steps=[9]).ended == 0  # job 9 may be the same user's
    assert running(stays) == [True]
    assert clear("job").ended == 1  # as in the sweep, to which nobody says the job's SLUID
    assert running(stays) == [False]


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
        (place / "cmdline").write_text(f"{row.title or row.name}\0")
        text = f"0::{row.unit}\n"
        job = re.search(r"/job_\d+/.*", row.unit)
        if version == 1 and job:
            text = f"9:freezer:/slurm/uid_{row.uid}{job[0]}\n1:name=systemd:{SLURMD}\n0::/\n"
        elif version == 1:
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
