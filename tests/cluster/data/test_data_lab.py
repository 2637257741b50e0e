"""A node's data process: it outlives its ranks, dies alone, and a new node's goes on the same."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path
from typing import NamedTuple

import data_plan
from conftest import LabFactory
from jobs import Training, prepared

from lab.keeper.ranks import Process
from robust_slurm.data.steps import LocalSteps

HERE = Path(__file__).parent
WORLD, STEPS = 4, 40


def undisturbed() -> tuple[dict[tuple[int, int], int], float]:
    """Return the checksum of each rank's batch of each step, and the loss of all of them."""
    steps = LocalSteps(data_plan.plan(), range(WORLD), WORLD)
    steps.seek(None)
    found, loss = {}, 1.0
    for step in range(1, STEPS + 1):
        _, rows, _ = steps.next()
        for rank in range(WORLD):
            batch = rows[rank]
            content = b"".join(batch[name].tobytes() for name in sorted(batch))
            found[rank, step] = zlib.crc32(content)
        total = float(sum(found[rank, step] for rank in range(WORLD)))
        loss = loss * 0.99 + total * 1e-6
    steps.close()
    return found, loss


def data_processes(training: Training) -> dict[str, Process]:
    """By node."""
    found = training.processes("data/service/main.py")
    assert len({each.environ["SLURMD_NODENAME"] for each in found}) == len(found)
    return {each.environ["SLURMD_NODENAME"]: each for each in found}


class Read(NamedTuple):
    """A batch that a rank has read, and how long it took."""

    rank: int
    step: int
    crc: int
    seconds: float
    epoch: int
    node: str


def order(training: Training) -> list[Read]:
    """Return all that the ranks have read, in the order of ranks and times."""
    found = []
    for rank in range(WORLD):
        for line in (training.dir / f"order-{rank}").read_text().splitlines():
            step, crc, took, epoch, node = line.split()
            found.append(Read(rank, int(step), int(crc), float(took), int(epoch), node))
    return found


def planned(training: Training, node: str) -> list[int]:
    """The steps that the node's data processes have made so far."""
    return [int(line) for line in (training.dir / f"planned-{node}").read_text().split()]


def test_the_same_order_whatever_dies(new_lab: LabFactory) -> None:
    """A rank is killed, then a data process, then a node: the checksum of every batch that any
    rank reads is that of an undisturbed run, and nobody is blamed for a data process."""
    lab = new_lab(nodes=3, standby=0)
    training = prepared(lab, WORLD, STEPS)
    toy = ["--data", "data_plan:plan", "--hold", "12,18,28"]
    words = training.line(["--robust-spares=1"], toy)
    training.submit(
        f"export PYTHONPATH=$PYTHONPATH:{HERE}\n{words}", ["-N3", "--ntasks-per-node=2"]
    )

    training.wait_step(12)
    first = data_processes(training)
    assert set(first) == {"n1", "n2"}, training.story()
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
    assert training.says("^robust-task: the data process of data_plan:plan was killed by SIGKILL")
    lab.crash("n2")

    expected, loss = undisturbed()
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": STEPS, "loss": loss}
    training.check_gone()
    assert not training.in_memory()
    told = order(training)
    assert [each for each in told if expected[each.rank, each.step] != each.crc] == []
    assert {(each.rank, each.step) for each in told} == set(expected)
    assert {each.node for each in told if each.step == STEPS} == {"n1", "n3"}
    firsts = {(each.epoch, each.node): each.seconds for each in reversed(told)}
    print("seconds to the first batch, by epoch and node:", firsts)  # 2 cores for all of it
    assert not training.accusations().keys() - {"n2"}
