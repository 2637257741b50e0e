"""DDP under robust-srun: what was saved in memory survives ranks, nodes and bad copies."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import pytest
from ckpt_jobs import CheckpointJob, Copy, Undisturbed, undisturbed
from conftest import LabFactory
from torch_forks import TorchForks
from waiting import until

from lab import Cluster
from lab.spec import address

INTERFACE, ADDRESS = "snap0", "10.88.0.2"
"""The interface for snapshots that one node has, and its address."""


@pytest.fixture(scope="module")
def ddp(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("ddp")
    ballast = "--ballast=100000"  # bytes; a snapshot is three times that
    return undisturbed(torch_forks, "ckpt_ddp.py", directory, 2, 16, ballast)


def test_ranks_killed_three_times_in_a_row(lab: Cluster, ddp: Undisturbed) -> None:
    training = ddp.job(lab)
    kills = "1:5:1,2:5:0,3:11:1"  # in the first step of a pass, there again, and within a pass
    size = ["-N2", "--ntasks-per-node=1"]
    training.start("", f"--kill={kills}", sbatch=size, durable=False)
    training.check_ended()
    assert training.resumed() == [0, 4, 4, 10], training.story()
    for record in training.check_lost(3):
        assert (record["symptom"], record["action"]) == ("crash", "restart")
        assert record["restored"], record
    assert training.says("^robust-srun: checkpoints: every step in memory"), training.out()


def test_ranks_that_move_to_other_nodes_keep_their_state(lab: Cluster, ddp: Undisturbed) -> None:
    """A rank is killed twice without a cause: the nodes exchange their ranks, rank 0 included.

    Snapshots have a network of their own, whose interface one of the two nodes lacks.
    """
    training = ddp.job(lab)
    options = "--hold=1:6,2:6"
    robust = f"--robust-checkpoint-interface={INTERFACE}"
    with snapshot_network(lab):
        training.start(robust, options, sbatch=["-N2", "--ntasks-per-node=1"], durable=False)
        for epoch in (1, 2):
            training.wait_held(epoch, 6)
            training.wait_replicas(5)
            check_snapshot_network(training)
            until(
                lambda: training.rosters()[-1]["step"] == 5, "step 5 is known"
            )  # so none is new later
            training.kill(ddp.program, rank=1)
        training.check_ended()
    assert training.resumed() == [0, 5, 5], training.story()
    first, second = training.check_lost(2)
    assert (first["rung"], second["rung"]) == ("in-place", "exchange"), training.story()
    assert second["action"] == "restart" and second["restored"] and not second["swaps"]
    nodes = [event["nodes"] for event in training.events("epoch")]
    assert nodes[2] == nodes[0][::-1] and not training.accusations(), training.story()


@contextmanager
def snapshot_network(lab: Cluster) -> Iterator[None]:
    """Give n2 an interface of another network, which n1 can reach and has no interface for."""
    add = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", f"{INTERFACE}p"]
    route = [f"{ADDRESS}/32", "via", address("n2")]
    commands = {
        "n2": (
            add,
            ["ip", "address", "add", f"{ADDRESS}/32", "dev", INTERFACE],
            ["ip", "link", "set", INTERFACE, "up"],
        ),
        "n1": (["ip", "route", "add", *route],),
    }
    try:
        for node, lines in commands.items():
            for argv in lines:
                lab.exec(node, argv, user=False, check=True)
        yield
    finally:
        lab.exec("n1", ["ip", "route", "del", *route], user=False)
        lab.exec("n2", ["ip", "link", "del", INTERFACE], user=False)


def check_snapshot_network(training: CheckpointJob) -> None:
    """n1's replicas go to the interface of n2; n1 itself, which has none, says so."""
    why = f"checkpoint_interface {INTERFACE}: no interface with this name"
    assert f"{why}; snapshots use the network of the messages" in training.said_alarms()
    assert training.says(f"^robust-srun: checkpoints, n1: {why}"), training.out()
    sockets = training.lab.exec("n1", ["cat", "/proc/net/tcp"]).stdout
    remote = socket.inet_aton(ADDRESS)[::-1].hex().upper()
    peers = [line.split()[2].split(":")[0] for line in sockets.splitlines()[1:]]
    assert remote in peers, sockets


def test_bad_copies_in_memory(lab: Cluster, ddp: Undisturbed) -> None:
    """A flipped bit is noticed: the replica serves; both copies bad: the step before serves."""
    training = ddp.job(lab)
    options = "--hold=1:6,2:11"
    training.start("", options, sbatch=["-N2", "--ntasks-per-node=1"], durable=False)
    training.wait_held(1, 6)
    training.wait_replicas(5)
    flip_a_bit(training.wait_copy("own", 1, 5))
    training.kill(ddp.program, rank=0)
    training.wait_held(2, 11)
    training.wait_replicas(10)
    flip_a_bit(training.wait_copy("own", 0, 10))
    tear(training.wait_copy("replica", 0, 10))
    training.kill(ddp.program, rank=1)
    training.check_ended()
    assert training.resumed() == [0, 5, 9], training.story()
    flipped, torn = training.check_lost(2)
    assert (flipped["lost_steps"], torn["lost_steps"]) == (0, 1)
    passed = [(e["owner"], e["step"], e["why"]) for e in training.events("passed_over")]
    first = [why for owner, step, why in passed if (owner, step) == (1, 5)]
    second = [why for owner, step, why in passed if (owner, step) == (0, 10)]
    assert len(first) == 1 and "differs from its digest" in first[0], passed
    assert len(second) == 2, passed


def flip_a_bit(copy: Copy) -> None:
    """In the last tensor of the file."""
    with copy.path.open("r+b") as file:
        at = file.seek(-3, 2)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def tear(copy: Copy) -> None:
    """Make the copy look as if it were still being written."""
    with copy.path.open("r+b") as file:
        file.write(bytes(8))


def test_nodes_lost_amid_the_transfer_of_a_replica(new_lab: LabFactory, ddp: Undisturbed) -> None:
    """A spare, then a standby node takes the ranks; the replica on its way is not used."""
    lab = new_lab(nodes=3, standby=1)
    training = ddp.job(lab)
    # Most of a step is then the transfer of its replica.
    robust = "--robust-spares=1 --robust-checkpoint-bandwidth=0.3"
    training.start(robust, sbatch=["-N3", "--ntasks-per-node=1"], durable=False)
    training.wait_saved(4)
    until(
        lambda: any(c.kind == "replica" and c.step is None for c in training.copies()), "transfer"
    )
    lab.crash("n2")
    training.wait_saved(9, epoch=2)
    lab.crash("n3")
    training.check_ended()
    spare, standby = training.check_lost(2)
    assert (spare["action"], spare["swaps"]) == ("swap_spare", [["n2", "n3"]])
    assert (standby["action"], standby["swaps"]) == ("swap_standby", [["n3", "s1"]])


def test_a_slow_link_slows_training_only_until_fewer_steps_are_saved(
    lab: Cluster, ddp: Undisturbed
) -> None:
    training = ddp.job(lab)
    # About 2 s for each replica.
    slow = "--robust-checkpoint-bandwidth=0.1 --robust-checkpoint-overhead=3"
    size = ["-N2", "--ntasks-per-node=1"]
    training.start(slow, "--hold=1:15", sbatch=size, durable=False)
    training.wait_held(1, 15)
    every = r"in memory every \d+\w\w step \(rank \d: a snapshot and"
    assert training.says(f"^robust-srun: checkpoints: {every}"), training.out()
    shown = f"checkpoints of step .*{every}"
    training.until(lambda: re.search(shown, status(training)), "its status")
    ended = [line["at"] for line in training.lines(0) if "step" in line]
    took = [after - before for before, after in pairwise(ended)]
    assert median(took[-3:]) < median(took[:3]) / 4, took  # those wait for a replica each
    training.kill(ddp.program, rank=1)
    training.check_ended()
    assert training.resumed()[1] <= 14, training.story()


def status(training: CheckpointJob) -> str:
    argv = ["robust-status", "--state-dir", str(training.state), str(training.job)]
    return " ".join(training.lab.exec("head", argv, timeout=60).stdout.split())


def test_no_replica_is_claimed_where_no_node_has_room_for_one(
    new_lab: LabFactory, ddp: Undisturbed
) -> None:
    lab = new_lab(nodes=2, standby=0)
    for node in ("n1", "n2"):
        small = ["mount", "-o", "remount,size=64m", "/dev/shm"]
        lab.exec(node, small, user=False, check=True)
    training = ddp.job(lab)
    size = ["-N2", "--ntasks-per-node=1"]  # of a snapshot 24 MB: two fit, and no replica
    training.start("", "--ballast=16000000 --hold=1:8", sbatch=size, durable=False)
    training.wait_says("^robust-srun: checkpoints: every step in memory")
    assert training.says("no replica is on another node: a lost node costs"), training.out()
    assert not training.says("replicas survive"), training.out()
    survives = "a roster that says what is lost"
    training.until(lambda: "not 1 node" in str(training.rosters()[-1]["checkpoint"]), survives)
    lab.exec("head", ["scancel", str(training.job)], check=True)
    training.wait_end()
    training.check_gone()
