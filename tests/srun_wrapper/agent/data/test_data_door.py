"""robust-task keeps a node's data process: it is no rank's, and never the reason for anything."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

from robust_slurm import process_stat
from robust_slurm.data.errors import DataError
from robust_slurm.data.loader import open_steps
from robust_slurm.data.named import plan_named
from robust_slurm.data.service import client
from robust_slurm.data.service.either import steps_of
from robust_slurm.data.service.main import FAILED, NICE
from robust_slurm.resizing.world import TrainingWorld
from srun_wrapper.agent.data import keeper, pings
from srun_wrapper.agent.data.door import NAME, DataDoor, _elsewhere
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting
from srun_wrapper.protocol.data_messages import DataReport, report_from

PROGRAM = """
import ctypes, json, os, socket, sys, threading, time
order = json.load(sys.stdin)
with open(order["name"], "a") as file:
    print(os.getpid(), os.environ.get("RANK"), os.environ.get("OWN"), file=file)
if os.path.exists(order["name"] + ".exit"):
    sys.exit(int(open(order["name"] + ".exit").read()))
if os.path.exists(order["name"] + ".half"):
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).pthread_exit(None)
if os.path.exists(order["name"] + ".child") and not os.fork():
    time.sleep(60)
listener = socket.socket(fileno=order["listen"])
def serve(sock):
    sock.send(b"%d" % os.getpid())
    while sock.recv(100):
        while os.path.exists(order["name"] + ".busy"):
            pass
        sock.send(b"here")
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Node:
    """A door in a loop, and the ranks that ask at it."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.directory = directory
        self.door = DataDoor(self.loop, directory, b"k" * 32)
        self.program = directory / "program.py"
        self.program.write_text(PROGRAM)

    def turn(self) -> None:
        self.loop.turn(0.01)
        starting.reaped(process_tree.reap())

    def until(self, condition: Any, what: str) -> None:
        def turned() -> bool:
            self.turn()
            return bool(condition())

        until(turned, what, 20.0, every=0.0)

    def ask(self, name: str, **more: Any) -> tuple[socket.socket, dict[str, Any]]:
        request = {
            "op": "ask", "name": str(self.directory / name), "python": sys.executable,
            "main": str(self.program), "path": sys.path, "directory": "/", "world": "2", "code": "",
            "memory": 1, "environ": {**os.environ, "RANK": "1", "OWN": "mine"}, **more,
        }  # fmt: skip
        return self.say(json.dumps(request).encode() + b"\n")

    def say(self, line: bytes) -> tuple[socket.socket, dict[str, Any]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.directory / NAME))
        sock.setblocking(False)
        sock.send(line)
        heard = bytearray()

        def answered() -> bool:
            try:
                heard.extend(sock.recv(4096))
            except BlockingIOError:
                return False
            return True

        self.until(answered, "the answer")
        return sock, json.loads(heard)

    def pids(self, name: str) -> list[int]:
        path = self.directory / name
        lines = path.read_text().splitlines() if path.exists() else []
        assert all(line.split()[1:] == ["None", "mine"] for line in lines)
        return [int(line.split()[0]) for line in lines]

    def started(self, name: str, lives: int = 1) -> int:
        self.until(lambda: len(self.pids(name)) == lives, f"life {lives} of {name}")
        return self.pids(name)[-1]

    def served_by(self, answer: dict[str, Any]) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(answer["path"])
            return int(sock.recv(100))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.door.close()
    node.until(lambda: not starting._pending, "the end of all data processes, and of their starts")
    assert not keeper.processes()
    assert not list(tmp_path.glob("data-*"))


@pytest.mark.slow
def test_it_outlives_its_ranks_and_gives_way_to_another(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    first, answer = node.ask("a")
    pid = node.started("a")
    assert (
        answer["op"] == "here"
        and answer["served"] is False
        and node.served_by(answer) == pid == keeper.processes()[0]
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
    assert sorted(keeper.processes()) == sorted([pid, *node.pids("b")])
    third.close()
    for _ in range(5):
        node.turn()
    fifth, changed = node.ask("b", code="2")  # "a" is wanted by nobody, "b" still is
    node.started("b", lives=2)
    node.until(lambda: pid not in keeper.processes(), "the end of the first")
    assert changed["path"] != other["path"] and len(keeper.processes()) == 2
    assert not caplog.records
    fourth.close()
    fifth.close()


@pytest.mark.slow
def test_one_that_dies_is_started_again_but_not_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "BACKOFF", 0.01)
    rank, answer = node.ask("a")
    for life in range(1, keeper.DEATHS + 1):
        pid = node.started("a", life)
        assert node.served_by(answer) == pid
        os.kill(pid, signal.SIGKILL)
    node.until(lambda: len(caplog.records) == 2, "the last death")
    first, last = (record.message for record in caplog.records)
    assert first.endswith("/a was killed by SIGKILL; restarting it")
    assert last.endswith("again and is not started any more; ranks prepare their own data")
    _, refused = node.ask("a")
    assert refused["op"] == "refused" and "5 times within 600 s" in refused["why"]
    told = report_from(node.door.news.due(0.25))
    assert told == DataReport(keeper.DEATHS, "it has ended 5 times within 600 s")
    with pytest.raises(ConnectionRefusedError):
        node.served_by(answer)
    rank.close()


def test_one_with_a_thread_that_waits_for_a_file_system_gives_way_at_its_end(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.directory / "a.half").touch()
    rank, answer = node.ask("a")
    pid = node.started("a")
    node.until(lambda: process_stat.read(pid).state == "Z", "the end of its first thread")
    (node.directory / "a.half").unlink()
    again, same = node.ask("a")
    other = node.started("a", lives=2)
    assert same == answer and node.served_by(answer) == other
    assert sorted(keeper.processes()) == sorted([pid, other])  # the first is no rank's either
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: keeper.processes() == [other], "the end of the first")
    third, _ = node.ask("a")
    assert len(node.pids("a")) == 2 and not caplog.records
    for sock in (rank, again, third):
        sock.close()


@pytest.fixture
def subreaper() -> Iterator[None]:
    """This process gets the orphans, as robust-task does."""
    process_tree.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.mark.usefixtures("subreaper")
def test_a_reader_that_outlives_its_data_process_is_no_ranks(node: Node) -> None:
    (node.directory / "a.child").touch()
    rank, _ = node.ask("a")
    pid = node.started("a")
    node.until(lambda: process_tree.children(pid) != [], "its child")
    (reader,) = process_tree.children(pid)
    (node.directory / "a.child").unlink()
    os.kill(pid, signal.SIGKILL)
    other = node.started("a", lives=2)
    assert sorted(keeper.processes()) == sorted([other, reader])
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    assert keeper.processes() == [other]
    os.kill(other, signal.SIGKILL)
    node.started("a", lives=3)
    assert not keeper._ended_sessions  # none is left of it: its number may be a rank's
    rank.close()


def test_one_that_is_stopped_is_replaced_and_one_that_works_is_not(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pings, "EVERY", 0.05)
    looks = []
    look = pings._look
    monkeypatch.setattr(pings, "_look", lambda pid: looks.append(look(pid)) or looks[-1])
    rank, _ = node.ask("a")
    pid = node.started("a")
    node.until(lambda: node.ask("a")[1]["served"], "its first answer")
    looks.clear()
    (node.directory / "a.busy").touch()  # it answers nobody, and computes
    node.until(lambda: len(looks) > 3 * pings.MOST, "a long time")
    assert keeper.processes() == [pid] and not caplog.records
    os.kill(pid, signal.SIGSTOP)
    assert node.started("a", lives=2) != pid
    said = [record.message for record in caplog.records]
    assert "a has not answered for 15 s and does nothing; killing it" in said[0]
    assert said[1].endswith("/a was killed by SIGKILL; restarting it")
    rank.close()


def test_one_that_is_debugged_is_left_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pings, "EVERY", 0.01)
    looks, dead = [], []
    states = {"t", "S"}
    monkeypatch.setattr(pings, "_look", lambda pid: looks.append(pid) or (7, states))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(node.directory / "silent.sock"))
        silent.listen()
        asks = pings.Pings(
            node.loop, node.directory / "silent.sock", lambda: 1, lambda: dead.append(1)
        )
        asks.begin()
        asks.answered = True
        node.until(lambda: len(looks) > 3 * pings.MOST, "a long time")
        assert not dead
        states.remove("t")
        node.until(lambda: dead, "its death")
        asks.end()


@pytest.mark.slow
def test_one_without_a_plan_waits_for_the_next_rank_and_one_without_ranks_too(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.directory / "a.exit").write_text(str(FAILED))
    rank, _ = node.ask("a")
    node.started("a")
    node.until(lambda: not keeper.processes(), "its end")
    (node.directory / "a.exit").unlink()
    again, answer = node.ask("a")
    pid = node.started("a", lives=2)
    assert node.served_by(answer) == pid and not caplog.records
    rank.close()
    again.close()
    for _ in range(5):
        node.turn()
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: caplog.records and not keeper.processes(), "its end")
    for _ in range(5):
        node.turn()
    assert len(node.pids("a")) == 2
    node.ask("a")
    assert node.started("a", lives=3)


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
        (pid,) = keeper.processes()
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(mine + NICE, 19)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        assert "ARROW_DEFAULT_MEMORY_POOL=system" in Path(f"/proc/{pid}/environ").read_text()
        os.kill(pid, signal.SIGTERM)  # as Slurm sends it to all of the step
        os.kill(pid, signal.SIGUSR1)
        same(2)
        assert keeper.processes() == [pid]
        os.kill(pid, signal.SIGKILL)
        same(5)
        del states[3:]
        steps.seek(states[-1])  # back to a snapshot
        same(3)
        assert keeper.processes() != [pid] and len(keeper.processes()) == 1
        with pytest.raises(
            DataError, match=r"ZeroDivisionError: division by zero \(.*its_plan.py:5"
        ):
            steps_of("its_plan:broken", world, make)
        assert "in <lambda>" in capfd.readouterr().err
        (node.directory / "its_plan.py").write_text(PLAN + "# edited while the job runs\n")
        for pid in keeper.processes():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataError, match="its_plan:plan has changed since the ranks"):
            for _ in range(200):  # the first may have come already
                steps.next()
        (node.directory / "its_plan.py").write_text(PLAN)
        until(lambda: not keeper.processes(), "the end of the one that cannot make the plan", 60.0)
        steps.seek(states[-1])
        same(2)
        (late, _) = steps_of("its_plan:plan", world, make)
        node.loop.call(node.door.close)  # robust-task is gone, and the data process with it
        monkeypatch.setattr(client, "PATIENCE", 0.3)
        same(3)
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
