"""robust-task's door to a node's data process: who gets which, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import data_nodes
import numpy as np
import pytest
from data_nodes import Node
from waiting import until

from robust_slurm.data.errors import DataError
from robust_slurm.data.loader import open_steps
from robust_slurm.data.named import plan_named
from robust_slurm.data.service import client
from robust_slurm.data.service.either import steps_of
from robust_slurm.data.service.in_hand import MOST
from robust_slurm.data.service.main import NICE
from robust_slurm.data.service.ring import SMALL
from robust_slurm.resizing.world import TrainingWorld
from srun_wrapper.agent.data import data_process
from srun_wrapper.agent.data.door import NAME, DataDoor, _elsewhere
from srun_wrapper.agent.loop import Loop

node = data_nodes.node


@pytest.mark.slow
def test_it_outlives_its_ranks_and_gives_way_to_another(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    first, answer = node.ask("a")
    pid = node.started("a")
    assert (
        answer["op"] == "here"
        and answer["served"] is False
        and node.served_by(answer) == pid == data_process.processes()[0]
    )
    second, same = node.ask("a", environ={"RANK": "0", "OWN": "other"})
    assert same["path"] == answer["path"]
    first.close()
    second.close()
    for _ in range(5):
        node.turn()
    third, same = node.ask("a")
    assert same["path"] == answer["path"] and node.pids("a") == [pid]
    fourth, other = node.ask("b")  # a second one beside it, for the same ranks
    assert other["path"] != answer["path"] and node.started("b")
    assert sorted(data_process.processes()) == sorted([pid, *node.pids("b")])
    third.close()
    for _ in range(5):
        node.turn()
    fifth, changed = node.ask("b", code="2")  # "a" is wanted by nobody, "b" still is
    node.started("b", lives=2)
    node.until(lambda: pid not in data_process.processes(), "the end of the first")
    assert changed["path"] != other["path"] and len(data_process.processes()) == 2
    assert not caplog.records
    fourth.close()
    fifth.close()


def test_what_cannot_be_started_or_understood_is_refused_or_told(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for line in (b"{}\n", b"[1]\n", b"\xff\n", b'{"name": 1}\n'):
        _, answer = node.say(line)
        assert answer["op"] == "refused" and answer["why"]
    node.ask("a", python="/nonexistent/python")
    node.until(lambda: caplog.records, "the warning")
    assert "a cannot be started: " in caplog.records[0].message
    node.ask("b\n" * 5000, python="/nonexistent/python")
    node.until(lambda: len(caplog.records) > 1, "another one")
    assert caplog.records[1].message.count("\n") == 0 and len(caplog.records[1].message) < 500


PLAN = """
import time
from pathlib import Path
until = time.monotonic() + 20
while Path(__file__).with_name("slow").exists() and time.monotonic() < until:
    time.sleep(0.01)
from memory_source import corpus
from robust_slurm.data.plan import Plan
plan = Plan({"web": corpus("web", 1), "code": corpus("code", 2)}, pack=256, batch=2, mesh={"dp": 2})
broken = lambda: 1 / 0
"""


def test_a_real_one_makes_the_same_steps_whatever_dies(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (node.directory / "its_plan.py").write_text(PLAN)
    monkeypatch.syspath_prepend(str(node.directory))
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(node.directory))
    monkeypatch.setattr(client, "SILENCE", 300.0)  # a machine that does much else
    over = threading.Event()
    turning = threading.Thread(target=lambda: [node.turn() for _ in iter(over.is_set, True)])
    turning.start()
    try:
        make = lambda: open_steps(plan_named("its_plan:plan"), world)  # noqa: E731
        world = TrainingWorld(1, 2, 2)
        (own, _), (steps, shares) = make(), steps_of("its_plan:plan", world, make)
        assert shares == (1,)
        states: list[Any] = [None]

        def same(count: int) -> None:
            own.seek(states[-1])
            for _ in range(count):
                wanted, got = own.next(), steps.next()
                assert (got[0], got[2], got[1].keys()) == (wanted[0], wanted[2], {1})
                for name, array in wanted[1][1].items():
                    np.testing.assert_array_equal(got[1][1][name], array)
                states.append(got[2])

        same(4)
        (pid,) = data_process.processes()
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(mine + NICE, 19)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        assert "ARROW_DEFAULT_MEMORY_POOL=system" in Path(f"/proc/{pid}/environ").read_text()
        os.kill(pid, signal.SIGTERM)  # as Slurm sends it to all of the step
        os.kill(pid, signal.SIGUSR1)
        same(2)
        assert data_process.processes() == [pid]
        (file,) = node.directory.glob("data-*.json")
        until(lambda: json.loads(file.read_text())[0] == SMALL, "all steps ahead", 60.0)
        until(lambda: same(1) or len(steps._steps._hand) > MOST - 4, "steps in hand", 60.0)
        (slow := node.directory / "slow").touch()
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        same(MOST - 4)  # they are in hand: the next process has no plan yet
        assert time.monotonic() - began < 20 and data_process.processes() != [pid]
        slow.unlink()
        same(5)
        del states[3:]
        steps.seek(states[-1])  # back to a snapshot
        same(3)
        assert data_process.processes() != [pid] and len(data_process.processes()) == 1
        with pytest.raises(
            DataError, match=r"ZeroDivisionError: division by zero \(.*its_plan.py:10"
        ):
            steps_of("its_plan:broken", world, make)
        assert "in <lambda>" in capfd.readouterr().err
        (node.directory / "its_plan.py").write_text(PLAN + "# edited while the job runs\n")
        for pid in data_process.processes():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataError, match="its_plan:plan has changed since the ranks"):
            for _ in range(200):  # the first may have come already
                steps.next()
        (node.directory / "its_plan.py").write_text(PLAN)
        until(lambda: not data_process.processes(), "its end: no plan", 60.0)
        steps.seek(states[-1])
        same(2)
        (late, _) = steps_of("its_plan:plan", world, make)
        node.loop.call(node.door.close)  # robust-task is gone, and the data process with it
        monkeypatch.setattr(client, "PATIENCE", 0.3)
        same(MOST + 4)  # of these some are in hand
        assert capfd.readouterr().err.count("it prepares its data itself") == 1
        (node.directory / "its_plan.py").write_text(PLAN + "# edited while the job runs\n")
        monkeypatch.delitem(sys.modules, "its_plan")
        with pytest.raises(DataError, match="its_plan:plan has changed since the ranks"):
            late.next()
    finally:
        over.set()
        turning.join()


def test_no_port_is_open_where_no_other_node_can_use_it(tmp_path: Path) -> None:
    for nodes, opened in ((1, False), (2, False), (3, True)):
        run_dir = tmp_path / str(nodes)
        run_dir.mkdir()
        door = DataDoor(Loop(), run_dir, b"k" * 32, nodes)
        assert bool(door.port) is opened and (run_dir / NAME).exists()
        door.close()


def test_a_rank_in_a_container_is_refused(tmp_path: Path) -> None:
    for pid, mount in ((1, "mnt:[1]"), (2, "mnt:[2]"), (os.getpid(), "mnt:[1]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        for name in ("pid", "user"):
            (tmp_path / str(pid) / "ns" / name).symlink_to(f"{name}:[1]")
        (tmp_path / str(pid) / "ns" / "mnt").symlink_to(mount)
        (tmp_path / str(pid) / "root").symlink_to("/")
    where = lambda pid: tmp_path / str(pid)  # noqa: E731
    assert _elsewhere(1, where) == ""
    assert _elsewhere(2, where) == "the rank is in a container of its own (mnt namespace)"
    assert _elsewhere(0, where) == "the rank is in a container of its own"
