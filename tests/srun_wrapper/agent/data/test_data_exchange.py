"""Three nodes' data processes: each lane is read by two of them, and all make the same steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

from robust_slurm.data.exchange.placement import numbered, preference
from robust_slurm.data.loader import open_steps
from robust_slurm.data.named import plan_named
from robust_slurm.data.service.client import NodeSteps
from robust_slurm.resizing.world import TrainingWorld
from srun_wrapper.agent.data import data_process
from srun_wrapper.agent.data.door import DataDoor
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting
from srun_wrapper.orders.starting import data_nodes

pytestmark = pytest.mark.slow

NODES = 3
PLAN = """
import os, threading
from memory_source import MemorySource
from robust_slurm.data.plan import Plan

READS = os.path.join(os.environ["READS"], os.environ["NODE"])  # of this process

class Watched(MemorySource):
    def read(self, part, start=0):
        with open(READS, "a") as file:
            print(self.name, threading.current_thread().name, file=file)
        return super().read(part, start)

def watched(name, seed):
    return Watched(name, [[3000 + 7 * n for n in range(20)] for _ in range(6 + seed)], lanes=3)

sources = {"web": watched("web", 1), "code": watched("code", 2)}
plan = Plan(sources, pack=8192, batch=1, mesh={"dp": 3})
"""


class Doors:
    """The doors of three nodes, in one loop that a thread turns."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.directories = [directory / str(node) for node in range(NODES)]
        self.doors = []
        for each in self.directories:
            each.mkdir()
            self.doors.append(DataDoor(self.loop, each, b"k" * 32))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def _turn(self) -> None:
        while not self._over.is_set():
            self.loop.turn(0.01)
            starting.reaped(process_tree.reap())

    def close(self) -> None:
        for door in self.doors:
            self.loop.call(door.close)
        until(lambda: not starting._pending, "the end of all, and of their starts")
        assert not data_process.processes()
        self._over.set()
        self._thread.join()


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    doors = Doors(tmp_path)
    yield doors
    doors.close()


def test_lanes_are_read_by_two_nodes_of_three_and_outlive_each(
    doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_plan.py").write_text(PLAN)
    (tmp_path / "reads").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ROBUST_TEST_DATA_SILENCE", "60")  # on a machine that does other things
    monkeypatch.setenv("READS", str(tmp_path / "reads"))
    addresses = [("127.0.0.1", door.port) for door in doors.doors]
    assert all(port for _, port in addresses)
    assert data_nodes(0, addresses[:2]) == {}, "two nodes read all lanes, both"
    assert data_nodes(0, addresses * 1000) == {}, "no rank could be started with it"

    def at(node: int) -> None:
        monkeypatch.setenv("NODE", str(node))
        monkeypatch.setenv("ROBUST_BEAT_DIR", str(doors.directories[node]))
        for name, value in data_nodes(node, addresses).items():
            monkeypatch.setenv(name, value)

    ranks = []
    for node in range(NODES):
        at(node)
        ranks.append(NodeSteps("shared_plan:plan", TrainingWorld(node, NODES, NODES)))
    monkeypatch.setenv("NODE", "test")
    plan = plan_named("shared_plan:plan")
    own = [open_steps(plan, TrainingWorld(node, NODES, NODES))[0] for node in range(NODES)]
    states: list[Any] = [None]

    def same(count: int) -> None:
        for each in own:
            each.seek(states[-1])
        for _ in range(count):
            for node, steps in enumerate(ranks):
                at(node)
                wanted, got = own[node].next(), steps.next()
                assert (got[0], got[2], got[1].keys()) == (wanted[0], wanted[2], {node})
                for name, array in wanted[1][node].items():
                    np.testing.assert_array_equal(got[1][node][name], array)
            states.append(got[2])

    def read_by() -> dict[tuple[str, int], set[int]]:
        """Return the nodes that have read each lane for others, by the lane."""
        found: dict[tuple[str, int], set[int]] = {}
        for node in range(NODES):
            for line in (tmp_path / "reads" / str(node)).read_text().splitlines():
                source, _, number = line.rsplit(" ", 1)[1].partition("/")
                if number:  # else a sample is read again
                    found.setdefault((source, int(number)), set()).add(node)
        return found

    same(4)
    numbers = numbered((source, lane) for source in ("web", "code") for lane in range(3))
    assert read_by() == {
        lane: {*list(preference(number, NODES))[:2]} for lane, number in numbers.items()
    }
    told = [door.news._read for door in doors.doors]

    def known() -> bool:
        found = [report and report.figures for report in (read() for read in told)]
        return all(each and not each.all_here and len(each.sources) == 2 for each in found)

    until(known, "the figures of all three")
    pids = data_process.processes()
    assert len(pids) == NODES
    os.kill(pids[0], signal.SIGKILL)
    same(4)

    def followed() -> bool:
        now = data_process.processes()  # with the readers that the killed one has left
        return len(now) == NODES and pids[0] not in now

    until(followed, "another data process, and no reader of the killed one")
    for pid in data_process.processes()[:2]:
        os.kill(pid, signal.SIGKILL)
    del states[4:]
    for node, steps in enumerate(ranks):
        at(node)
        steps.seek(states[-1])
    same(4)
    for each in (*own, *ranks):
        each.close()
