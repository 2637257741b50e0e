"""Hangs in the kernel on a real Slurm: the gate answers, slurmd goes on, nothing piles up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from gate_lab import GateLab, gate_lab
from waiting import until

from lab import Cluster

DEADLINE_S = 8.0  # [gate] prolog_deadline: all checks
CALLS_S = 6.0  # and what follows it at the most: two calls to Slurm


class Hang(NamedTuple):
    node: str
    begin: Callable[[Cluster, str], object]
    reason: str  # with {dir} for the lab's directory and {job}
    again_s: float  # the most that a prolog takes that knows of it


HANGS = {
    "nvmlInit": Hang(
        "n1",
        lambda lab, node: lab.gpu(node, nvml_hang="dstate"),
        "robust:node:nvml-hung:-:reboot:job{job}",
        4.5,
    ),
    "one GPU": Hang(
        "n2",
        lambda lab, node: lab.gpu(node, 1, nvml_hang="dstate"),
        "robust:node:nvml-hung:gpu1:reboot:job{job}",
        4.5,
    ),
    "file server": Hang(
        "n3",
        lambda lab, node: lab.stale_mount(node),
        "robust:node:mount-hung:{dir}/node/scratch:none:job{job}",
        4.5,
    ),
}


@pytest.fixture(scope="module")
def site() -> Iterator[GateLab]:
    with gate_lab(nodes=5) as made:
        made.put_last("n4")
        yield made


@pytest.fixture(scope="module")
def first(site: GateLab) -> dict[str, int]:
    """A job for each node that hangs, all at once."""
    jobs = {}
    for name, hang in HANGS.items():
        hang.begin(site.lab, hang.node)
        jobs[name] = site.submit_on(hang.node, "n4")
    return jobs


def stuck(site: GateLab, node: str) -> list[str]:
    """The command lines of what hangs in state D on a node."""
    return [argv for state, argv in site.processes(node) if state.startswith("D")]


@pytest.mark.parametrize("name", HANGS)
def test_answers_within_its_deadline(site: GateLab, first: dict[str, int], name: str) -> None:
    hang, job = HANGS[name], first[name]
    until(lambda: site.prolog_failed(hang.node, job), "the end of the prolog", 40)
    assert site.seconds_of_prologs(hang.node)[-1] < DEADLINE_S + CALLS_S
    (run,) = [e for e in site.local(hang.node, "run") if e.data["where"] == "prolog"]
    assert run.data["ms"] < DEADLINE_S * 1000
    assert site.reason(hang.node) == hang.reason.format(dir=site.lab.spec.dir, job=job)
    # slurmd waited for another process than the one that is still stuck. (A process that reads
    # from a busy disk is in state D for a moment, too.)
    until(lambda: len(stuck(site, hang.node)) == 1, "one stuck process", 20)
    site.wait_requeued(job)
    site.start_now(job)
    assert site.ended(job)["NodeList"] == "n4"


@pytest.mark.parametrize("name", HANGS)
def test_a_second_job_does_not_add_to_it(site: GateLab, first: dict[str, int], name: str) -> None:
    hang, earlier_job = HANGS[name], first[name]
    until(lambda: site.prolog_failed(hang.node, earlier_job), "the drain", 40)
    site.lab.exec("head", ["scancel", str(earlier_job)])  # in case that it waits to start again
    until(lambda: not site.completing(earlier_job), "end of the first job", 90)
    before = stuck(site, hang.node)
    earlier = len(site.seconds_of_prologs(hang.node))
    site.resume(hang.node)  # an administrator who knows no better
    job = site.submit(f"-w{hang.node}")
    site.wait_requeued(job, 40)
    site.lab.exec("head", ["scancel", str(job)], check=True)
    assert site.reason(hang.node) == hang.reason.format(dir=site.lab.spec.dir, job=job)
    assert stuck(site, hang.node) == before
    assert all(s < hang.again_s for s in site.seconds_of_prologs(hang.node)[earlier:])
    site.lab.heal(hang.node)
    until(lambda: stuck(site, hang.node) == [], "the stuck processes gone")


def test_a_driver_that_is_only_slow_needs_no_reboot(site: GateLab) -> None:
    site.lab.gpu("n5", nvml_hang="sleep")
    job = site.submit_on("n5", "n4")
    site.wait_requeued(job, 40)
    assert site.reason("n5") == f"robust:node:nvml-slow:-:none:job{job}"
    assert "persistence mode off?" in site.said("n5")
    assert stuck(site, "n5") == []
    site.start_now(job)
    assert site.ended(job)["NodeList"] == "n4"
    site.lab.heal("n5")
    site.sweep("n5")
    until(lambda: site.node("n5") == (frozenset({"IDLE"}), ""), "the sweep's undrain", 20)
