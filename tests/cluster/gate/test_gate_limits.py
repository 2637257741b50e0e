"""Bounds of the gate on a real Slurm: the circuit breaker, the opt-outs, what it cannot reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gate_lab import FREE, WIDE, GateLab, gate_lab
from waiting import until

ALL = tuple(f"n{number}" for number in range(1, 6))
IB_DOWN = "robust:node:ib-down:mlx5_0:none:job{}"


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=len(ALL)) as site:
        site.put_last("n5")
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    """All nodes well and in service, nothing on record of drains."""
    made.settings()
    yield made
    made.mend()
    (made.state / "nodes" / "drains.jsonl").unlink(missing_ok=True)


def all_at_once(site: GateLab) -> tuple[list[str], list[str]]:
    """A job on every node, each with the same fault: the nodes drained, and those that admitted."""
    for node in ALL:
        site.lab.link(node, up=False)
    jobs = {node: site.submit(f"-w{node}") for node in ALL}
    drained, admitted = [], []
    for node, job in jobs.items():

        def decided(job: int = job) -> bool:
            record = site.lab.job(job)
            return record["JobState"] == "COMPLETED" or record["Restarts"] == "1"

        until(decided, f"job {job} on {node}")
        if site.lab.job(job)["JobState"] == "COMPLETED":
            assert site.node(node) == FREE or "DRAIN" not in site.node(node)[0]
            admitted.append(node)
        else:
            assert site.reason(node) == IB_DOWN.format(job)
            drained.append(node)
    return drained, admitted


def test_a_fault_of_the_whole_fleet(site: GateLab) -> None:
    site.settings(breaker="max_nodes = 2\nmax_percent = 100.0\nmax_per_job = 9\n")
    drained, admitted = all_at_once(site)
    assert (len(drained), len(admitted)) == (2, 3)
    for node in admitted:
        words = (
            "NOT drained, the circuit breaker is at its limit: 2 other nodes were drained "
            "automatically"
        )
        assert any(words in event.data["did"] for event in site.shared(node, "run"))
    site.sweep(admitted[0])  # the sweep is bound as well
    assert site.reason(admitted[0]) == ""


def test_percent_of_the_fleet_without_a_shared_ledger(site: GateLab) -> None:
    site.settings(breaker="max_nodes = 9\nmax_percent = 40.0\nmax_per_job = 9\n", state=False)
    drained, admitted = all_at_once(site)
    assert (len(drained), len(admitted)) == (2, 3)


def test_a_job_does_not_walk_through_the_cluster(site: GateLab) -> None:
    site.settings(breaker="max_nodes = 9\nmax_percent = 100.0\nmax_per_job = 1\n")
    site.lab.link("n1", up=False)
    site.lab.link("n2", up=False)
    job = site.submit_on("n1", "n2")
    site.wait_requeued(job)
    (first,) = [node for node in ("n1", "n2") if site.reason(node)]
    site.start_now(job)
    record = site.ended(job)
    (second,) = {"n1", "n2"} - {first}
    assert (record["JobState"], record["NodeList"]) == ("COMPLETED", second)
    assert site.reason(second) == ""
    assert f"1 other node was drained for job {job}" in str(site.local(second, "run"))


@pytest.mark.parametrize(
    ("gate", "args", "did"),
    [
        ("", ["--comment", "please robust:skip"], "skip"),
        ('disabled = ["infiniband"]', [], ""),
        ('disabled = ["ib-down"]', [], ""),
        ("dry_run = true", [], "not drained: dry run"),
        ("enabled = false", [], ""),
    ],
    ids=["skip", "family off", "finding off", "dry run", "gate off"],
)
def test_admitted_all_the_same(site: GateLab, gate: str, args: list[str], did: str) -> None:
    site.settings(gate)
    site.lab.link("n3", up=False)
    job = site.run("n3", *args)
    assert site.output(job) == f"{job} n3\n"
    mine = [event for event in site.local("n3") if event.data.get("job") == job]
    if did == "skip":
        (skip,) = [event for event in mine if event.kind == "skip"]
        assert skip.data["granted"] and skip.data["by"] == "SLURM_JOB_COMMENT"
        # The epilog looks all the same: the next job need not suffer.
        assert site.reason("n3") == IB_DOWN.format(job)
        return
    assert site.node("n3") == FREE
    if did:
        assert [event.data["did"] for event in mine if event.kind == "run"] == [did, did]
        assert not [event for event in mine if event.kind == "drain"]


def test_skipping_can_be_forbidden(site: GateLab) -> None:
    site.settings("allow_skip = false")
    site.lab.link("n3", up=False)
    job = site.submit("-wn3", "--comment", "robust:skip")
    site.wait_requeued(job)
    assert site.reason("n3") == IB_DOWN.format(job)
    assert [event.data["granted"] for event in site.local("n3", "skip")][-1] is False


def test_a_slurmctld_that_does_not_answer(site: GateLab) -> None:
    hold = site.hold_slurm_calls()
    site.lab.link("n4", up=False)
    job = site.submit_on("n4", "n5")
    hold.wait()
    site.controller("STOP")
    try:
        asked = hold.let_go()
        until(lambda: site.prolog_failed("n4", job), "the end of the prolog", 20)
        (drain,) = [event for event in site.local("n4", "drain") if event.data["job"] == job]
    finally:
        site.controller("CONT")
    assert drain.time - asked < 6, "two calls of 3 s at the most"
    assert (drain.data["placed"], drain.data["as"]) == (False, "Prolog error")
    site.wait_requeued(job)
    site.wait_reason("n4", "Prolog error")
    site.start_now(job)
    assert site.ended(job)["NodeList"] == "n5"
    site.lab.heal("n4")  # and what Slurm said in our place is taken back as ours
    site.sweep("n4")
    site.wait_node("n4", *FREE)


def test_a_full_spool(site: GateLab) -> None:
    site.settings('disabled = ["disk"]', spool="/dev/shm/gate")
    site.lab.fill("n4", "/dev/shm")
    site.lab.link("n4", up=False)
    job = site.submit_on("n4", "n5")
    site.wait_requeued(job)
    assert site.reason("n4") == IB_DOWN.format(job)
    assert "not recorded" in site.said("n4") and "No space left" in site.said("n4")
    site.lab.heal("n4")
    site.sweep("n4")
    site.wait_node("n4", *FREE)


def test_a_dead_state_directory(site: GateLab) -> None:
    nodes = f"{site.lab.scratch}/state/nodes"
    site.lab.exec("n4", ["mkdir", "-p", nodes], user=False, check=True)
    site.settings(breaker=WIDE, state_dir=f"{site.lab.scratch}/state")
    site.lab.stale_mount("n4")
    job = site.submit_on("n4", "n5")
    site.wait_requeued(job, 40)
    place = f"{site.lab.spec.dir}/node/scratch"
    assert site.reason("n4") == f"robust:node:mount-hung:{place}:none:job{job}"
    (drain,) = [event for event in site.local("n4", "drain") if event.data["job"] == job]
    assert site.seconds_of_prologs("n4")[-1] < 8 + 2 * 3
    site.lab.heal("n4")
    site.lab.exec("n4", ["mkdir", "-p", nodes], user=False, check=True)
    site.sweep("n4")
    site.wait_node("n4", *FREE)
    shared = site.lab.exec("n4", ["cat", f"{nodes}/n4.jsonl"], user=False, check=True).stdout
    assert drain.data["reason"] in shared, "merged when it is back"
