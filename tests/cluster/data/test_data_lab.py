"""A node's data process: it outlives its ranks, dies alone, and a new node's goes on the same; so
does a job of fewer nodes, and of all again."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, NamedTuple

import data_plan
import pytest
from conftest import LabFactory
from holds import roles
from jobs import REPOSITORY, Training, prepared

from lab import Cluster
from lab.keeper.ranks import Process
from robust_slurm.data.exchange.placement import VARIABLE
from robust_slurm.data.steps import LocalSteps

PLANS = REPOSITORY / "tests" / "support" / "data"
WORLD, SHARES, STEPS = 6, 3, 48


def undisturbed() -> tuple[dict[tuple[int, int], int], float]:
    """Return the checksum of each share's batch of each step, and the loss of all of them."""
    steps = LocalSteps(data_plan.plan(), range(SHARES), SHARES)
    steps.seek(None)
    found, loss = {}, 1.0
    for step in range(1, STEPS + 1):
        _, rows, _ = steps.next()
        for share in range(SHARES):
            found[share, step] = data_plan.checksum(rows[share])
        total = 2.0 * sum(found[share, step] for share in range(SHARES))  # each for two ranks
        loss = loss * 0.99 + total * 1e-6
    steps.close()
    return found, loss


def data_processes(training: Training) -> dict[str, Process]:
    """Return the data processes by node."""
    found = training.processes("data/service/main.py")
    assert len({each.environ["SLURMD_NODENAME"] for each in found}) == len(found)
    return {each.environ["SLURMD_NODENAME"]: each for each in found}


class Read(NamedTuple):
    """A batch that a rank has read, and how long it took."""

    rank: int
    step: int
    share: int
    crc: int
    seconds: float
    epoch: int
    node: str


def order(training: Training) -> list[Read]:
    """Return all that the ranks have read, in the order of ranks and times."""
    found = []
    for rank in range(WORLD):
        for line in (training.dir / f"order-{rank}").read_text().splitlines():
            step, share, crc, took, epoch, node = line.split()
            numbers = int(step), int(share), int(crc), float(took), int(epoch)
            found.append(Read(rank, *numbers, node))
    return found


def planned(training: Training, node: str) -> list[int]:
    """The steps that the node's data processes have made so far."""
    return [int(line) for line in (training.dir / f"planned-{node}").read_text().split()]


def set_standby(lab: Cluster, state: str, *more: str) -> None:
    argv = ["scontrol", "update", "nodename=s1", f"state={state}", *more]
    lab.exec("head", argv, user=False, check=True)


def data_shown(training: Training) -> dict[str, Any]:
    """The data side of the job, as the newest roster has it."""
    rosters = training.rosters()
    return (rosters[-1]["data"] or {}) if rosters else {}


def check_status(training: Training) -> None:
    """robust-status shows the job's data: steps ahead, sources, skipped records, deaths."""

    def seen() -> bool:
        data = data_shown(training)
        read = {row["name"] for row in data.get("sources", []) if row["read"] and row["skipped"]}
        return data.get("processes") == 3 and data["deaths"] == 1 and read == {"web", "code"}

    training.until(seen, "the figures of three data processes")
    argv = ["robust-status", "--state-dir", str(training.state), str(training.job)]
    text = training.lab.exec("head", argv, timeout=60).stdout
    done = json.loads(training.lab.exec("head", [*argv, "--json"], timeout=60).stdout)
    print(text)
    ahead = r"^data of step 0: .* of 32 steps ahead.* tokens/s \(.*web .* bad records skipped"
    assert re.search(ahead, text, re.M), text
    assert re.search(r"^data processes of step 0: .*died 1 time so far$", text, re.M), text
    data = done["steps"][0]["data"]
    assert data["ranks"] == WORLD and data["nodes"] == 3 and data["most_ahead"] == 32, data
    assert isinstance(data["waited_s"], float) and isinstance(data["most_waited"], list)


def check_groups(told: list[Read]) -> None:
    """Both ranks of a share have read all of it, on different nodes."""
    for epoch in {each.epoch for each in told}:
        wide = 2 if epoch == 4 else 3  # data-parallel ranks; shares are dealt to them
        expected = {
            (rank, share)
            for rank in range(2 * wide)
            for share in range(SHARES)
            if share % wide == rank % wide
        }
        assert {(each.rank, each.share) for each in told if each.epoch == epoch} == expected
    last = {(each.share, each.step): each.epoch for each in sorted(told, key=lambda r: r.epoch)}
    nodes: dict[tuple[int, int], set[str]] = {}
    for each in told:
        if each.epoch == last[each.share, each.step]:
            nodes.setdefault((each.share, each.step), set()).add(each.node)
    assert {len(both) for both in nodes.values()} == {2}


def test_the_same_order_whatever_dies(new_lab: LabFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed, then a data process, then a node, then one that nothing replaces, and the
    job goes on with two nodes, and then with three again: the checksum of every batch that any
    rank reads is that of an undisturbed run, and nobody is blamed for a data process.

    Sources are files of two formats, which readers decode; two ranks each have the same rows."""
    lab = new_lab(nodes=4, standby=1)
    set_standby(lab, "drain", "reason=test")
    training = prepared(lab, WORLD, STEPS)
    data_plan.write_files(training.dir / "corpus")
    monkeypatch.setenv(data_plan.CORPUS, str(training.dir / "corpus"))
    toy = ["--data", "data_plan:plan", "--hold", "12,18,28,36,42"]
    fewer = ["--robust-min-nodes=2", f"--robust-mesh=dp={WORLD}", "--robust-standby-wait=1"]
    words = training.line(["--robust-spares=1", *fewer], toy)
    training.submit(
        f"export PYTHONPATH=$PYTHONPATH:{PLANS} {data_plan.CORPUS}={training.dir}/corpus\n{words}",
        ["-N4", "--ntasks-per-node=2"],
    )

    training.wait_step(12)
    training.until(lambda: len(list(training.dir.glob("read-*"))) == 3, "readers on three nodes")
    training.until(lambda: max(planned(training, "n1")) > 18, "steps ahead")
    first = data_processes(training)
    assert set(first) == {"n1", "n2", "n3"}, training.story()
    known = [json.loads(each.environ[VARIABLE]) for each in first.values()]
    assert sorted(place for place, _ in known) == [0, 1, 2]
    (ports,) = {tuple(port for _, port in nodes) for _, nodes in known}
    assert len(set(ports)) == 3 and all(ports)
    before = planned(training, "n1")
    training.kill("toy.py", rank=1)

    training.wait_step(18)
    again = data_processes(training)
    assert {n: p.pid for n, p in again.items()} == {n: p.pid for n, p in first.items()}
    since = planned(training, "n1")[len(before) :]
    assert since and min(since) >= max(before) > 12, (before, since)  # none was made again
    os.kill(first["n1"].pid, signal.SIGKILL)
    (training.dir / "go-on-18").touch()

    training.wait_step(28)
    assert data_processes(training)["n1"].pid != first["n1"].pid
    assert len(training.incidents()) == 1, training.story()
    training.wait_says("^robust-task: the data process of data_plan:plan was killed by SIGKILL")
    check_status(training)
    lab.crash("n2")

    training.wait_step(36)
    of_six = {node: each.pid for node, each in data_processes(training).items()}
    assert set(of_six) == {"n1", "n3", "n4"}
    lab.crash("n3")
    training.wait_step(42)
    assert training.events("epoch")[-1]["nodes"] == ["n1", "n4"], training.story()
    of_four = {node: each.pid for node, each in data_processes(training).items()}
    assert of_four == {node: of_six[node] for node in ("n1", "n4")}  # they outlive the world
    set_standby(lab, "resume")
    training.until(lambda: ("s1", "spare") in roles(training), "s1 waits for a recovery")
    training.kill("toy.py", rank=1)

    expected, loss = undisturbed()
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": STEPS, "loss": loss}
    training.check_gone()
    assert not training.in_memory()
    told = order(training)
    assert [each for each in told if expected[each.share, each.step] != each.crc] == []
    assert {(each.share, each.step) for each in told} == set(expected)
    assert {each.node for each in told if each.step == STEPS} == {"n1", "n4", "s1"}
    check_groups(told)
    assert [i["resized"] for i in training.incidents()] == [[], [], [6, 4], [4, 6]]
    firsts = {(each.epoch, each.node): each.seconds for each in reversed(told)}
    print("seconds to the first batch, by epoch and node:", firsts)  # 2 cores for all of it
    assert not training.accusations().keys() - {"n2", "n3"}
