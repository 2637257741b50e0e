"""Xids 13 and 31 of programs: whose job they are, and when the GPU becomes the suspect."""

from __future__ import annotations

import pytest
from fake_gpus import h100, snapshot
from fake_system import NOW, UPTIME, FakeSystem, context, log
from node_events import GPU, OTHER, did, xid
from node_events import NOW as THEN

from health.checks.gpu import xid as check
from health.node.system import Event
from health.nvidia.suspects import of_job, suspects


def app(job: int, uid: int, gpu: str = GPU, days: float = 1.0) -> Event:
    return did("app-xid", days * 86400, gpu=gpu, codes=[13], job=job, uid=uid)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], {}),
        # one user's program, however often
        ([app(n, 1000) for n in range(40)], {}),
        ([app(1, 1000), app(2, 1001)], {}),
        (
            [app(1, 1000), app(2, 1001), app(3, 1002), app(4, 1002)],
            {GPU: "4 jobs of 3 users had Xid 13 or 31 on this GPU alone in 14 days, limit 3 users"},
        ),
        # too long ago; a clock that was wrong
        ([app(1, 1000), app(2, 1001), app(3, 1002, days=15)], {}),
        ([app(1, 1000), app(2, 1001), app(3, 1002, days=-1)], {}),
        # a program that fails on several GPUs proves nothing about one of them
        ([app(1, 1000), app(2, 1001), app(3, 1002), app(3, 1002, OTHER)], {}),
        # two GPUs of the node alike: a shared cause
        ([app(n, 1000 + n, gpu) for n, gpu in enumerate([GPU, OTHER] * 3)], {}),
        ([app(n, 1000 + n) for n in range(3)] + [app(9, 1009, OTHER)], {GPU: "3 jobs of 3 users"}),
    ],
)
def test_suspects(events: list[Event], said: dict[str, str]) -> None:
    found = suspects(events, THEN, 3, 14.0)
    assert set(found) == set(said)
    assert all(found[gpu].startswith(text) for gpu, text in said.items())


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([xid(13), xid(31), xid(13, gpu=OTHER)], {GPU: [13, 31]}),  # OTHER is not the job's
        ([xid(43), xid(79), xid(13, ago=4000)], {}),
        # the epilog of the job before wrote it down
        ([xid(13, ago=600), did("app-xid", 500, gpu=GPU, codes=[13], job=1, uid=1000)], {}),
        ([xid(31, ago=400), did("app-xid", 500, gpu=GPU, codes=[13], job=1, uid=1)], {GPU: [31]}),
    ],
)
def test_the_xids_of_a_job(events: list[Event], found: dict[str, list[int]]) -> None:
    assert of_job(events, {GPU}, THEN - 3600) == found


def test_from_epilog_to_finding() -> None:
    """Three users' jobs end after an Xid 13 on one GPU; one of them has it written down twice."""
    devices = [h100(n) for n in range(2)]
    bus = devices[1]["pci"][:-2]
    line = f"NVRM: Xid (PCI:{bus}): 13, pid=7, name=python, Graphics SM Warp Exception"
    history: list[Event] = []
    for n in range(3):
        system = FakeSystem(
            kmsg=log(line, time=UPTIME - 60),
            snapshot=snapshot(devices),
            context=context("epilog", job=7 + n, uid=1000 + n, SLURM_JOB_GPUS="0,1"),
            history=history,
            now=NOW + n * 7200,
            boot=f"boot-{n}",
        )
        assert {f.check for f in check.CHECK.run(system)} == {"xid-app"}
        fresh = check.of_job(system)
        assert [(e.data["gpu"], e.data["uid"]) for e in fresh] == [(devices[1]["pci"], 1000 + n)]
        system.events += fresh
        assert check.of_job(system) == []
        history = list(system.events)
    later = FakeSystem(history=history, snapshot=snapshot(devices), now=NOW + 90000)
    (found,) = check.CHECK.run(later)
    assert (found.status, found.check, found.device) == ("WARN", "xid-app-users", "gpu1")
