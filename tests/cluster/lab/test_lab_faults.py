"""The lab's faults: crash, hang, a cut link; what they do, and how a node comes back."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from lab_nodes import hostnames
from waiting import until

from lab import Cluster, Lab, LabError


def test_crash_takes_all_at_once_and_lets_no_farewell_out(lab: Cluster) -> None:
    listen = "import socket; s=socket.create_server(('', 5000)); c,_=s.accept(); c.recv(1)"
    dial = (
        "import socket,sys\ns=socket.create_connection(('n2',5000)); print('on',flush=True)\n"
        "s.settimeout(2)\ntry: print('farewell', s.recv(1))\nexcept TimeoutError: print('silence')"
    )
    with lab.popen("n2", ["python", "-c", listen]) as server:
        until(lambda: ":1388 " in lab.exec("n2", ["cat", "/proc/net/tcp"]).stdout, "server", 20)
        with lab.popen("n1", ["python", "-c", dial], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "on\n"
            lab.exec("n2", ["touch", "/tmp/old", "/dev/shm/old"])
            before = time.time()
            at = lab.crash("n2")
            assert before <= at <= time.time()
            assert server.wait(20) == -signal.SIGKILL
            assert client.stdout.readline() == "silence\n"
    assert lab.faults()["n2"] == "crashed"
    assert lab.exec("n2", ["true"]).returncode == 125
    with pytest.raises(LabError, match="crashed already"):
        lab.crash("n2")
    lab.heal("n2")
    # The clone itself may lie below /tmp and is shown there.
    assert "old" not in lab.exec("n2", ["ls", "-A", "/tmp", "/dev/shm"]).stdout.split()
    assert hostnames(lab, 4) == ["n1", "n2", "n3", "n4"]


def test_crash_right_after_a_job_does_not_block_the_node(lab: Cluster) -> None:
    for _ in range(2):
        assert len(hostnames(lab, 4)) == 4
        lab.crash("n3")
        lab.heal("n3")
    assert len(hostnames(lab, 4)) == 4


def test_job_that_lost_its_node_is_requeued_after_the_heal(lab: Cluster) -> None:
    job = lab.sbatch("#!/bin/sh\nsleep 600\n", ["-w", "n4", "--requeue"])
    lab.wait_job(job, "RUNNING")
    lab.crash("n4")
    lab.heal("n4")
    assert lab.wait_job(job, "PENDING", 30)["Restarts"] == "1"
    lab.exec("head", ["scancel", str(job)], check=True)


def test_drained_node_stays_drained_through_crash_and_heal(lab: Cluster) -> None:
    drain = ["scontrol", "update", "nodename=n3", "state=drain", "reason=mine"]
    lab.exec("head", drain, user=False, check=True)
    try:
        lab.crash("n3")
        lab.heal("n3")
        assert "DRAIN" in lab.nodes()["n3"]
        assert lab.node_records()["n3"]["Reason"].startswith("mine")
    finally:
        resume = ["scontrol", "update", "nodename=n3", "state=resume"]
        lab.exec("head", resume, user=False, check=True)
    until(lambda: lab.nodes()["n3"] == {"IDLE"}, "idle node", 20)


_TICK = "while :; do date +%s%N > /tmp/tick; sleep 0.02; done"


def tick(lab: Lab, node: str) -> str:
    return lab.exec(node, ["cat", "/tmp/tick"]).stdout


def test_hang_stops_all_and_heal_goes_on(lab: Cluster) -> None:
    with lab.popen("n2", ["bash", "-c", _TICK]) as ticker:
        until(lambda: tick(lab, "n2") != "", "first tick", 20)
        lab.hang("n2")
        assert lab.faults()["n2"] == "hung"
        seen = tick(lab, "n2")
        with pytest.raises(AssertionError):
            until(lambda: tick(lab, "n2") != seen, "tick", 0.5)
        lab.heal("n2")
        until(lambda: tick(lab, "n2") != seen, "tick after the heal", 20)
        ticker.terminate()
    assert lab.faults()["n2"] == "up"
    assert len(hostnames(lab, 4)) == 4


def test_hang_of_one_rank(lab: Cluster) -> None:
    loop = "while :; do date +%s%N > tick.$SLURM_PROCID; sleep 0.02; done"
    job = lab.sbatch(f"#!/bin/sh\nsrun bash -c '{loop}'\n", ["-N2", "--ntasks-per-node=2"])
    lab.wait_job(job, "RUNNING")
    paths = [lab.shared / f"tick.{rank}" for rank in range(4)]
    until(lambda: all(p.exists() for p in paths), "ranks", 20)
    lab.hang_rank(job, 2)
    assert list(lab.faults().values()).count("rank-hung") == 1

    def moving() -> list[bool]:
        old = [p.stat().st_mtime_ns for p in paths]
        until(
            lambda: sum(p.stat().st_mtime_ns != o for p, o in zip(paths, old, strict=True)) >= 3,
            "ticks of three ranks",
            20,
        )
        return [p.stat().st_mtime_ns != o for p, o in zip(paths, old, strict=True)]

    moving()  # a tick of rank 2 may have been on its way
    assert moving() == [True, True, False, True]
    stopped = next(node for node, state in lab.faults().items() if state == "rank-hung")
    lab.heal(stopped)
    old = paths[2].stat().st_mtime_ns
    until(lambda: paths[2].stat().st_mtime_ns != old, "tick after the heal", 20)
    lab.exec("head", ["scancel", str(job)], check=True)
    with pytest.raises(LabError, match="no process of rank 9"):
        lab.hang_rank(job, 9)


def test_partition_cuts_only_the_link(lab: Cluster) -> None:
    def reach() -> bool:
        probe = "import socket; socket.create_connection(('n2', 6818), timeout=0.3)"
        return lab.exec("n1", ["python", "-c", probe]).returncode == 0

    assert reach()
    lab.partition("n2")
    assert not reach()
    assert lab.exec("n2", ["true"]).returncode == 0
    lab.heal("n2")
    until(reach, "link to n2", 20)


def test_node_that_slurm_gave_up_is_usable_after_heal() -> None:
    with Cluster(nodes=2, standby=0, slurm_conf={"SlurmdTimeout": 3}) as lab:
        lab.partition("n1")
        lab.crash("n2")
        until(lambda: all("DOWN" in state for state in lab.nodes().values()), "nodes down", 60)
        lab.heal("n1")
        lab.heal("n2")
        assert hostnames(lab, 2) == ["n1", "n2"]


def test_a_slow_link_is_slow_in_one_direction_and_heals(lab: Cluster) -> None:
    """A second's worth at 8 Mbit/s, minus the bucket, is not there at once."""

    def seconds() -> float:
        port = 45112
        take = (
            "import socket, time\n"
            "server = socket.create_server(('', %d)); print('up', flush=True)\n"
            "link = server.accept()[0]; began = time.monotonic(); left = 1 << 21\n"
            "while left: left -= len(link.recv(min(left, 1 << 16)))\n"
            "print(time.monotonic() - began)"
        )
        give = "import socket; socket.create_connection(('n2', %d)).sendall(bytes(1 << 21))"
        with lab.popen(
            "n2", ["python", "-c", take % port], stdout=subprocess.PIPE, text=True
        ) as taker:
            assert taker.stdout is not None and taker.stdout.readline() == "up\n"
            lab.exec("n1", ["python", "-c", give % port], check=True)
            return float(taker.stdout.read())

    lab.slow("n2", "4mbit")
    assert lab.faults()["n2"] == "slow"
    assert seconds() > 2.5
    lab.heal("n2")
    assert lab.faults()["n2"] == "up"
    until(lambda: seconds() < 2.5, "the link's own speed")
    with pytest.raises(LabError, match="rate"):
        lab.slow("n2", "quickly")
