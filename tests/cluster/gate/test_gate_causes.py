"""Actions to which no shared cause, user or slip may bring the gate, on a real Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_jobs import begin, finish, of
from gate_lab import FREE, WIDE, GateLab, gate_lab
from waiting import until

STRANGER = 30001  # a uid that is nobody's here
DOWN = "robust:node:ib-down:mlx5_0:none:job0"


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=4) as site:
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    """All nodes well and in service, nothing on record of drains."""
    made.settings()
    yield made
    made.mend()
    (made.state / "nodes" / "drains.jsonl").unlink(missing_ok=True)


def test_a_directory_that_a_stranger_made_takes_no_job_its_voice(site: GateLab) -> None:
    job = begin(site, "n1")
    squatted = site.state / "jobs" / str(job)
    squatted.mkdir()
    os.chown(squatted, STRANGER, STRANGER)
    site.report_node("n1", job, place=f"{job}.{site.lab.uid}.1")
    finish(site, job)
    assert [event.data["result"] for event in of(site, "n1", job, "accusation")] == ["cleared"]
    assert of(site, "n1", job, "rejected") == []


def test_a_disk_that_a_user_filled_is_not_the_nodes_fault(site: GateLab) -> None:
    job = begin(site, "n1")
    fill = "yes | head -c 300M > /tmp/big; for n in $(seq 3000); do echo > /tmp/decoy$n; done"
    site.lab.exec("n1", ["sh", "-c", fill])
    site.sweep("n1")
    assert site.reason("n1") == "", "a running job may fill its disk"
    finish(site, job)
    site.wait_reason("n1", f"robust:user:disk-full-leftovers:/tmp:clear-leftovers:job{job}")
    site.lab.exec("n1", ["sh", "-c", "rm -f /tmp/big /tmp/decoy*"], check=True)
    site.sweep("n1")
    site.wait_node("n1", *FREE)


def test_a_dead_network_leaves_drains_for_a_dead_gpu(site: GateLab) -> None:
    site.settings(breaker="max_nodes = 1\nmax_percent = 100.0\nmax_per_job = 9\n")
    for node in ("n1", "n2"):
        site.lab.link(node, up=False)
    site.sweep("n1")
    assert site.reason("n1") == DOWN
    assert "NOT drained, the circuit breaker is at its limit" in site.sweep("n2")
    assert site.reason("n2") == ""
    site.lab.gpu("n2", 1, lost=True)
    site.sweep("n2")
    assert site.reason("n2") == "robust:node:gpu-gone:gpu1:reboot:job0"
    site.lab.heal("n2")
    site.repaired("n2")


def test_a_shared_cause_does_not_take_the_cluster_out_hour_by_hour(site: GateLab) -> None:
    hours = "max_nodes = 1\nmax_percent = 100.0\nwindow = 0.001\n"  # each drain in one of its own
    site.settings(breaker=hours)
    for node in ("n1", "n2", "n3"):
        site.lab.link(node, up=False)
        said = site.sweep(node)
    assert [site.reason(node) for node in ("n1", "n2", "n3")] == [DOWN, DOWN, ""]
    assert "2 other nodes stand drained automatically, the limit is 2 of 4" in said


def test_a_drain_is_held_down(site: GateLab) -> None:
    site.settings(hold="hold_down = 600\n")
    site.lab.link("n3", up=False)
    site.sweep("n3")
    site.lab.heal("n3")
    assert "stays drained: held down until" in site.sweep("n3")
    assert site.reason("n3") == DOWN
    site.repaired("n3")
    site.sweep("n3")
    site.wait_node("n3", *FREE)


def test_the_third_drain_of_a_day_is_for_service(site: GateLab) -> None:
    site.settings(hold="hold_down = 0\n")
    site.repaired("n4")  # what came before counts no more
    for number in (1, 2, 3):
        site.lab.link("n4", up=False)
        site.sweep("n4")
        assert site.reason("n4") == (DOWN if number < 3 else DOWN.replace("none", "service"))
        site.lab.heal("n4")
        site.sweep("n4")
    assert site.reason("n4"), "it waits for a person"
    site.repaired("n4")
    site.sweep("n4")
    site.wait_node("n4", *FREE)


def test_settings_that_are_lost_end_no_dry_run(site: GateLab) -> None:
    site.settings("dry_run = true")
    site.sweep("n1")  # keeps the copy
    (site.etc / "robust.toml").unlink()
    site.lab.link("n1", up=False)
    job = site.run("n1")
    assert site.node("n1") == FREE
    assert "would drain n1" in site.sweep("n1")
    runs = [event.data["did"] for event in site.local("n1", "run") if event.data["job"] == job]
    assert runs == ["not drained: dry run"] * 2


@pytest.fixture
def prefix(site: GateLab) -> Iterator[Path]:
    yield site.prefix
    away = site.prefix.with_name("away")
    if away.exists():
        away.rename(site.prefix)
    site.settings()
    site.install()


def test_a_prefix_that_is_away_drains_only_where_the_site_wants_it(
    site: GateLab, prefix: Path
) -> None:
    prefix.rename(prefix.with_name("away"))
    job = site.run("n1")
    assert site.output(job) == f"{job} n1\n" and site.node("n1") == FREE
    prefix.with_name("away").rename(prefix)
    site.settings('on_missing = "drain"')
    site.install()
    prefix.rename(prefix.with_name("away"))
    job = site.submit_on("n1", "n2")
    site.wait_requeued(job)
    drained = [node for node in ("n1", "n2") if site.reason(node) == "Prolog error"]
    assert drained, site.others()


def site_check(site: GateLab, code: int) -> None:
    program = site.etc / "own-check"
    fresh = program.with_suffix(".new")
    fresh.write_text(f"#!/bin/sh\necho 'the licence server has no seat'\nexit {code}\n")
    fresh.chmod(0o755)
    fresh.rename(program)
    site.settings(breaker=WIDE, more=f'[health.site.commands.seat]\nargv = ["{program}"]\n')


def test_a_sites_own_command_drains_and_frees(site: GateLab) -> None:
    site_check(site, 2)  # broken: proves nothing
    site.run("n2")
    assert site.node("n2") == FREE
    site_check(site, 1)
    job = site.submit_on("n2")
    site.wait_requeued(job)
    assert site.reason("n2") == f"robust:node:site-check:seat:none:job{job}"
    (drain,) = of(site, "n2", job, "drain")
    assert "the licence server has no seat" in drain.data["evidence"]
    site_check(site, 0)
    site.sweep("n2")
    site.wait_node("n2", *FREE)
    site.start_now(job)
    assert site.ended(job)["JobState"] == "COMPLETED"


def test_two_jobs_that_meet_one_fault_are_one_drain(site: GateLab) -> None:
    """The jobs' prologs run at the same time; each drains before it sees the other's drain."""
    site.repaired("n2")  # what came before counts no more
    hold = site.hold_slurm_calls()
    site.lab.link("n2", up=False)
    jobs = [site.submit("-wn2", "-n1") for _ in range(2)]
    asking = f"{site.etc.parent}/bin/scontrol"
    until(lambda: len([1 for _, words in site.processes("n2") if asking in words]) == 2, "both")
    hold.let_go()
    for job in jobs:
        site.wait_requeued(job)
    site.settings(hold="hold_down = 3600\n")
    site.lab.heal("n2")
    site.sweep("n2")
    argv = ["robust-health", "status", "--config", str(site.etc / "robust.toml")]
    said = site.lab.exec("n2", argv, user=False, check=True).stdout
    last = said.splitlines()[-2:]
    assert all("drain 1 for ib-down" in line for line in last), said


def test_a_users_mount_that_hangs_on_a_full_disk_is_not_the_nodes_fault(site: GateLab) -> None:
    site.lab.exec("n1", ["mkdir", "/tmp/own"], check=True)
    site.lab.stale_mount("n1", "/tmp/own")
    site.lab.exec("n1", ["sh", "-c", "yes | head -c 300M > /tmp/big"])
    site.sweep("n1")
    # The user's last job here, if he had one, for the limit per job.
    reason = "robust:user:disk-full-leftovers:/tmp:clear-leftovers:job"
    assert site.reason("n1").rstrip("0123456789") == reason
    site.lab.exec("n1", ["rm", "/tmp/big"], check=True)
    site.sweep("n1")
    site.wait_node("n1", *FREE)


def test_a_users_mount_that_hangs_keeps_no_others_files_on_the_node(site: GateLab) -> None:
    site.settings(more='[epilog]\nclean_dirs = ["/tmp"]\n')
    site.lab.exec("n3", ["mkdir", "/tmp/own"], check=True)
    site.lab.stale_mount("n3", "/tmp/own")
    job = site.run("n3", script="#!/bin/sh\necho x > /tmp/mine; echo x > /tmp/zzz\n")
    (cleared,) = of(site, "n3", job, "cleared")
    assert cleared.data["removed"] == 2
    there = site.lab.exec("n3", ["sh", "-c", "cd /tmp && echo *"], user=False, check=True).stdout
    assert there.split() == ["own"]
    assert site.node("n3") == FREE
