"""The epilog on a real Slurm: what jobs leave behind, and what they say against a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from gate_lab import FREE, GateLab, gate_lab
from kernel_lab import need_kernels
from waiting import until

from lab.slurm import releases

# A process that Slurm loses sight of, as without cgroups: a daemon; and a file in memory.
LEAVES = """#!/bin/sh
setsid sh -c 'setsid sleep {mark} & exit 0' </dev/null >/dev/null 2>&1
echo x > /dev/shm/left-$SLURM_JOB_ID
"""
STAYS = """#!/bin/sh
echo x > /dev/shm/mine-$SLURM_JOB_ID
sleep {mark} &
touch $HOME/{mark}.started
while [ ! -e $HOME/{mark}.end ]; do sleep 0.05; done
kill $!
"""
HANGS = """#!/bin/sh
setsid sh -c 'setsid stat {path} & exit 0' </dev/null >/dev/null 2>&1
sleep 0.2
"""


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=2) as site:
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    made.settings()
    yield made
    made.mend()


def running(site: GateLab, node: str, mark: str) -> bool:
    return any(argv.endswith(mark) for _, argv in site.processes(node))


def in_memory(site: GateLab, node: str) -> list[str]:
    return site.lab.exec(node, ["ls", "/dev/shm"], user=False, check=True).stdout.split()


# -- leftovers


ANONYMOUS = """#!/bin/sh
setsid sh -c 'env -i setsid sleep 1011 & exit 0' </dev/null >/dev/null 2>&1
touch $HOME/1011.started
echo "$SLURM_JOB_SLUID"
while [ ! -e $HOME/1011.end ]; do sleep 0.05; done
"""


def test_a_process_in_the_cgroup_of_a_jobs_sluid_is_ended() -> None:
    """Slurm 26.05 names cgroups by SLUID. A lab's Slurm makes none, so a file stands for one."""
    if why := releases.why_not("26.05"):
        pytest.skip(why)
    with gate_lab(nodes=1, slurm="26.05") as site:
        job = site.submit("-wn1", script=ANONYMOUS)
        until((site.lab.shared / "1011.started").exists, "the process that stays")
        until(lambda: site.output(job), "the job's SLUID")
        scope = "/system.slice/n1_slurmstepd.scope"
        text = f"0::{scope}/{site.output(job).strip()}/step_batch/user/task_0"
        shown = 'echo "$1" > /run/cgroup; mount --bind /run/cgroup /proc/$(pgrep -fx "$2")/cgroup'
        argv = ["sh", "-ec", shown, "sh", text, "sleep 1011"]
        site.lab.exec("n1", argv, user=False, check=True)
        (site.lab.shared / "1011.end").touch()
        assert site.ended(job)["JobState"] == "COMPLETED"
        assert not running(site, "n1", "1011")
        (cleared,) = site.local("n1", "cleared")
        assert (cleared.data["job"], cleared.data["ended"]) == (job, 1)


LEAVES_OWN = """#!/bin/sh
setsid sh -c 'env -i setsid sleep {mark} & exit 0' </dev/null >/dev/null 2>&1
cat /proc/self/cgroup > $HOME/{mark}.cgroup
touch $HOME/{mark}.started
while [ ! -e $HOME/{mark}.end ]; do sleep 0.05; done
"""


@pytest.mark.parametrize(("release", "job"), [("26.05", "s[0-9A-Z]{13}"), ("22.05", r"job_\d+")])
def test_what_a_job_leaves_in_a_real_cgroup_is_ended_and_no_more(release: str, job: str) -> None:
    """Neither environment nor parent tells whose a process is, and its user has another job there.

    With proctrack/cgroup Slurm ends such processes itself. Here it keeps the cgroups of tasks, and
    looks for the processes of a job elsewhere.
    """
    need_kernels(release)
    conf = {"ProctrackType": "proctrack/linuxproc"}
    with gate_lab(nodes=1, slurm=release, kernel=True, slurm_conf=conf) as site:
        jobs = []
        for mark in ("1021", "1022"):  # one after the other: the node has one core
            jobs.append(site.submit("-wn1", "--mem=100", script=LEAVES_OWN.format(mark=mark)))
            until((site.lab.shared / f"{mark}.started").exists, f"the process {mark}", 60)
        left, goes_on = jobs
        path = rf"0::/system\.slice/n1_slurmstepd\.scope/{job}/step_batch/user/task_0\n"
        assert re.fullmatch(path, (site.lab.shared / "1021.cgroup").read_text())
        (site.lab.shared / "1021.end").touch()
        assert site.ended(left, 60)["JobState"] == "COMPLETED"
        assert [running(site, "n1", mark) for mark in ("1021", "1022")] == [False, True]
        site.sweep("n1")
        assert running(site, "n1", "1022")
        (site.lab.shared / "1022.end").touch()
        assert site.ended(goes_on, 60)["JobState"] == "COMPLETED"
        assert not running(site, "n1", "1022")
        cleared = site.local("n1", "cleared")
        assert [event.data["job"] for event in cleared] == jobs, cleared
        assert all(event.data["ended"] for event in cleared), cleared
        assert site.node("n1") == FREE


def test_leftovers_are_cleared(site: GateLab) -> None:
    job = site.run("n1", script=LEAVES.format(mark="1001"))
    assert not running(site, "n1", "1001")
    assert in_memory(site, "n1") == []
    assert site.node("n1") == FREE
    (cleared,) = [event for event in site.local("n1", "cleared") if event.data["job"] == job]
    assert (cleared.data["ended"], cleared.data["removed"]) == (1, 1)


def test_a_service_and_a_login_of_the_same_user_go_on(site: GateLab) -> None:
    """The service was started by no job; the login is a shell that Slurm did not start."""
    daemon = "(setsid sleep 1004 </dev/null >/dev/null 2>&1 &)"
    site.lab.exec("n1", ["sh", "-c", daemon], check=True)
    login = site.lab.popen("n1", ["sleep", "1005"])
    try:
        for mode, service in (("job", True), ("user", False)):
            site.settings(more=f'[epilog]\nleftovers = "{mode}"\n')
            site.run("n1", script=LEAVES.format(mark="1006"))
            there = [running(site, "n1", mark) for mark in ("1004", "1005", "1006")]
            assert there == [service, True, False], mode
    finally:
        login.kill()
        login.wait()


def test_another_job_of_the_same_user_goes_on(site: GateLab) -> None:
    stays = site.submit("-wn1", script=STAYS.format(mark="1002"))
    until((site.lab.shared / "1002.started").exists, "the job that stays")
    site.run("n1", script=LEAVES.format(mark="1003"))
    assert running(site, "n1", "1002")
    assert f"mine-{stays}" in in_memory(site, "n1")
    (site.lab.shared / "1002.end").touch()
    assert site.ended(stays)["JobState"] == "COMPLETED"
    # Once the user is gone from the node, all of it is.
    assert not running(site, "n1", "1003")
    assert in_memory(site, "n1") == []


def test_what_cannot_be_killed_drains(site: GateLab) -> None:
    site.settings(
        'disabled = ["mounts"]\nepilog_deadline = 8.0'
    )  # else the stale mount itself would close the gate
    site.lab.stale_mount("n1")
    job = site.submit("-wn1", script=HANGS.format(path=site.lab.scratch))
    site.wait_reason("n1", f"robust:user:leftover-processes-stuck:-:none:job{job}", 40)
    assert running(site, "n1", f"stat {site.lab.scratch}")
    until(lambda: not site.completing(job), "its epilog", 40)
    site.lab.heal("n1")
    until(lambda: not running(site, "n1", f"stat {site.lab.scratch}"), "its end")
    site.sweep("n1")
    site.wait_node("n1", *FREE)
