"""robust-task keeps a node's data process: it is no rank's, and never the reason for anything."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator

import data_nodes
import pytest
from data_nodes import Node

from robust_slurm import process_stat
from robust_slurm.data.service.main import FAILED
from srun_wrapper.agent.data import data_process, pings
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.data_messages import DataReport, report_from

node = data_nodes.node


@pytest.mark.slow
def test_one_that_dies_is_started_again_but_not_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_process, "BACKOFF", 0.01)
    rank, answer = node.ask("a")
    for life in range(1, data_process.DEATHS + 1):
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
    assert told == DataReport(data_process.DEATHS, "it has ended 5 times within 600 s")
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
    assert sorted(data_process.processes()) == sorted([pid, other])  # the first is no rank's either
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: data_process.processes() == [other], "the end of the first")
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
    assert sorted(data_process.processes()) == sorted([other, reader])
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    assert data_process.processes() == [other]
    os.kill(other, signal.SIGKILL)
    node.started("a", lives=3)
    assert not data_process._ended_sessions  # none is left of it: its number may be a rank's
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
    assert data_process.processes() == [pid] and not caplog.records
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
    node.until(lambda: not data_process.processes(), "its end")
    (node.directory / "a.exit").unlink()
    again, answer = node.ask("a")
    pid = node.started("a", lives=2)
    assert node.served_by(answer) == pid and not caplog.records
    rank.close()
    again.close()
    for _ in range(5):
        node.turn()
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: caplog.records and not data_process.processes(), "its end")
    for _ in range(5):
        node.turn()
    assert len(node.pids("a")) == 2
    node.ask("a")
    assert node.started("a", lives=3)
