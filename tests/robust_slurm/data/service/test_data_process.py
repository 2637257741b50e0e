"""The data process and its ranks, in one process: what they hand over, and what goes wrong."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting_node import Counting, Node, rank, take
from too_few_threads import refuse_once
from waiting import until

from robust_slurm.data.errors import DataError, EndOfData, SourceStalled
from robust_slurm.data.service import client, in_hand, producer, server, wire
from robust_slurm.data.service.client import NodeSteps, ProcessGone
from robust_slurm.frames import json_lines


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(tmp_path))
    monkeypatch.setattr(producer, "AGAIN", 0.05)
    monkeypatch.setattr(producer, "WAIT", 0.05)
    monkeypatch.setattr(server.os, "sched_setaffinity", lambda *_: None)
    yield Counting()


def test_all_ranks_get_their_rows_and_a_repeated_step_comes_from_the_ring(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(producer, "TOGETHER", 60.0)
    node = Node(tmp_path, plan)
    first, second = rank(0), rank(1)
    assert (first.shares, second.shares) == ((0,), (1,))
    number, rows, state = first.next()
    assert (number, state, list(rows)) == (0, {"step": 1}, [0])
    assert rows[0]["x"].tolist() == [[0] * 3] * 2
    assert second.next()[1][1]["x"].tolist() == [[1] * 3] * 2
    assert first.identity() == plan.identity()
    assert plan.built == [[0, 1]]  # both were waited for
    rows[0]["x"] += 7  # a training that writes in place: into its own copy
    assert take(first, 4) == [1, 2, 3, 4]
    until(lambda: len(plan.numbers) >= 13, "steps ahead")
    sought = len(plan.sought)
    first.close()  # the rank restarts
    first = rank(0)
    first.seek(None)
    assert first.next()[1][0]["x"].tolist() == [[0] * 3] * 2
    first.seek({"step": 3})
    assert take(first, 2) == [3, 4]
    assert len(plan.sought) == sought  # nothing was read again
    assert len(plan.numbers) == len(set(plan.numbers))
    first.seek({"step": 100})
    assert take(first, 2) == [100, 101]
    first.seek({"step": 2})  # the ring has gone on: read again, the same
    assert first.next()[1][0]["x"].tolist() == [[20] * 3] * 2
    alone = rank(0, world=1)  # of a smaller world: it has both shares
    alone.seek({"step": 7})
    assert {share: row["x"][0, 0] for share, row in alone.next()[1].items()} == {0: 70, 1: 71}
    node.close()


def test_a_world_of_another_size_goes_on_with_the_same_process(
    tmp_path: Path, plan: Counting
) -> None:
    node = Node(tmp_path, plan)
    first, second = rank(0), rank(1)
    assert take(first, 3) == take(second, 3) == [0, 1, 2]
    alone = rank(0, world=1)
    assert alone._socket == first._socket  # robust-task has no other one for it
    alone.seek({"step": 2})
    number, rows, _ = alone.next()
    assert (number, rows.keys()) == (2, {0, 1})
    assert plan.numbers.count(2) == 1  # it had been made; others are made meanwhile
    assert take(alone, 40) == list(range(3, 43))
    assert plan.built == [[0, 1]] * 2  # may a source be held back: another world, another answer
    again = rank(1)  # the world has its first size again, and this node one of its ranks
    again.seek({"step": 41})
    assert take(again, 12) == list(range(41, 53))
    assert plan.built[2:] == [[1]] and again.next()[1].keys() == {1}
    # It had been made by one rank, that may hold a source back which two may not.
    assert plan.numbers.count(41) == 2
    node.close()


def test_what_fails_is_an_error_of_its_kind_once_and_tried_again(
    tmp_path: Path, plan: Counting, capfd: pytest.CaptureFixture[str]
) -> None:
    plan.raises = {1: DataError("web has nothing"), 2: ZeroDivisionError("division by zero")}
    node = Node(tmp_path, plan)
    steps = rank()
    assert take(steps, 1) == [0]
    with pytest.raises(DataError, match=r"web has nothing .*the job's output"):
        steps.next()
    del plan.raises[1]
    until(lambda: not node.producer._failed, "it is tried again")
    assert take(steps, 1) == [1]
    with pytest.raises(DataError, match=r"ZeroDivisionError: division by zero \(.*counting_node"):
        steps.next()
    del plan.raises[2]
    until(lambda: not node.producer._failed, "it is tried again")
    assert take(steps, 2) == [2, 3]
    plan.raises = dict.fromkeys(range(4, 99), EndOfData("its epochs are over"))
    steps.seek({"step": 50})
    for _ in range(2):
        with pytest.raises(EndOfData, match=r"^its epochs are over$"):
            steps.next()
    assert "in next" in capfd.readouterr().err  # the whole traceback
    with pytest.raises(DataError, match="does not fit 3 ranks"):
        rank(0, world=3)
    node.close()


def test_after_a_source_that_hangs_another_process_goes_on(tmp_path: Path, plan: Counting) -> None:
    """The thread that hangs may hold the lock of all others, for as long as the process lives."""
    plan.raises = {1: SourceStalled("web gives nothing")}
    node = Node(tmp_path, plan)
    steps = rank()
    assert take(steps, 1) == [0]
    with pytest.raises(SourceStalled, match=r"web gives nothing .*the job's output"):
        steps.next()
    node.run.join(20)
    assert not node.run.is_alive()
    node.die()
    plan.raises.clear()
    node.live()
    assert take(steps, 2) == [1, 2]
    node.close()


def test_a_plan_that_cannot_be_made_is_told_to_all(tmp_path: Path, plan: Counting) -> None:
    def broken() -> Any:
        raise NameError("name 'tokenizer' is not defined")

    node = Node(tmp_path, broken)
    for number in range(2):
        with pytest.raises(DataError, match="NameError: name 'tokenizer' is not defined"):
            rank(number).next()
    assert node.producer.broken is not None
    line = wire.LineSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    line._sock.connect(str(node.path))
    line.send({"op": "ping"})
    assert line.receive(60.0) == ({"op": "pong"}, [])
    until(lambda: not node.server._lines, "an end without waiting for robust-task")
    line.close()


def test_a_rank_waits_for_a_data_process_that_comes_back(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_hand, "MOST", 0)
    node = Node(tmp_path, plan)
    steps = rank()
    assert take(steps, 3) == [0, 1, 2]
    node.die()
    threading.Timer(0.2, node.live).start()
    assert take(steps, 3) == [3, 4, 5]
    node.die()
    monkeypatch.setattr(client, "PATIENCE", 0.2)
    with pytest.raises(ProcessGone, match="does not come back"):
        steps.next()
    node.answer = {"op": "refused", "why": "it has ended 5 times"}
    with pytest.raises(ProcessGone, match="it has ended 5 times"):
        steps.next()
    monkeypatch.delenv("ROBUST_BEAT_DIR")
    with pytest.raises(ProcessGone, match="no robust-task"):
        rank()


def test_a_greeting_that_was_not_taken_is_said_again(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, greet = Node(tmp_path, plan), NodeSteps._greet
    monkeypatch.setattr(client, "_socket_of", lambda _request: node.path.name)
    monkeypatch.setattr(client, "START", 1.0)
    greeted: list[NodeSteps] = []

    def first_fails(steps: NodeSteps) -> None:
        greeted.append(steps)
        if len(greeted) == 1:
            raise wire.Closed("the other end does not read")
        greet(steps)

    monkeypatch.setattr(NodeSteps, "_greet", first_fails)
    steps = rank(0)
    assert take(steps, 2) == [0, 1] and len(greeted) == 2
    steps.close()
    node.close()


def test_a_thread_too_few_costs_a_rank_no_more_than_another_try(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_once(monkeypatch, "data-rank")
    monkeypatch.setattr(client, "START", 20.0)
    node = Node(tmp_path, plan)
    assert take(rank(), 1) == [0] and not refused
    node.close()


def test_one_that_hangs_or_is_another_users_is_left(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, plan)
    steps = rank()
    monkeypatch.setattr(client, "SILENCE", 0.2)
    monkeypatch.setattr(server.RankServer, "_next", lambda *_: threading.Event().wait())
    with pytest.raises(ProcessGone, match=r"said nothing for 0\.2 s"):
        steps.next()
    monkeypatch.setattr(server.RankServer, "_welcome", lambda *_: threading.Event().wait())
    node.answer["served"] = True  # it is not at its start, for which a rank would wait longer
    with pytest.raises(ProcessGone, match=r"said nothing for 0\.2 s"):
        rank()
    monkeypatch.setattr(json_lines, "ours", lambda _uid: False)
    with pytest.raises(DataError, match=f"of user {os.getuid()}: not a data process"):
        rank()
    node.close()


def test_a_rank_that_was_stopped_meanwhile_has_not_waited(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``scontrol resume`` the kernel ends the wait that was amid, without an answer."""
    node = Node(tmp_path, plan)
    steps, real, waits = rank(), wire.LineSocket.receive, [0.0]

    def receive(line: wire.LineSocket, seconds: float | None) -> Any:
        if seconds is None or line is not steps._line:
            return real(line, seconds)
        waits.append(seconds)
        return None if len(waits) == 2 else real(line, seconds)

    monkeypatch.setattr(wire.LineSocket, "receive", receive)
    assert steps.next()[0] == 0 and len(waits) == 3
    assert max(waits) < client.SILENCE / 2
    node.close()
