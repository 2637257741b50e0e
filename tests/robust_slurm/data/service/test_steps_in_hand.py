"""Steps in hand: a rank goes on with them while its data process is away, each once, in order."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting_node import Counting, Node, rank, take
from waiting import until

from robust_slurm.data.errors import DataError
from robust_slurm.data.service import client, in_hand, producer, ring, server
from robust_slurm.data.service.client import NodeSteps, ProcessGone
from robust_slurm.data.service.ring import StepRing


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(tmp_path))
    monkeypatch.setattr(producer, "AGAIN", 0.05)
    monkeypatch.setattr(producer, "WAIT", 0.05)
    monkeypatch.setattr(client, "_socket_of", lambda _request: "1.sock")
    monkeypatch.setattr(server.os, "sched_setaffinity", lambda *_: None)
    yield Counting()


@pytest.fixture
def node(tmp_path: Path, plan: Counting) -> Iterator[Node]:
    found = Node(tmp_path, plan)
    yield found
    found.close()


def fill(steps: NodeSteps, count: int = in_hand.MOST) -> int:
    """Take steps until so many are in hand; return the number of the next one."""
    number = 0

    def full() -> bool:
        nonlocal number
        number = steps.next()[0] + 1
        steps._collect()
        return len(steps._hand) >= count

    until(full, "steps in hand")
    return number


def goes_on(steps: NodeSteps) -> bool:
    """Do what a rank does at its next step, and look whether more are in hand."""
    steps._collect()
    steps._keep_up()
    return len(steps._hand) > 3


def memory_files() -> int:
    """The memory files that this process has open or mapped."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found += "robust-data" in str(fd.readlink())
        except OSError:
            pass
    return found


def test_a_rank_does_not_wait_for_a_process_that_is_being_started(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rank(0), rank(1)
    at, other = fill(first), fill(second)
    node.die()
    real = NodeSteps._retry
    monkeypatch.setattr(NodeSteps, "_retry", lambda *_: pytest.fail("it waits"))
    assert take(first, in_hand.MOST) == list(range(at, at + in_hand.MOST))
    assert take(second, 3) == list(range(other, other + 3))
    monkeypatch.setattr(NodeSteps, "_retry", real)
    threading.Timer(0.1, node.live).start()
    at, other = at + in_hand.MOST, other + 3
    assert take(first, 20) == list(range(at, at + 20))  # they are at different steps
    assert take(second, 20) == list(range(other, other + 20))


def test_one_that_is_back_is_used_before_the_last_step_in_hand(node: Node) -> None:
    steps = rank()
    at = fill(steps)
    node.die()
    assert take(steps, 2) == [at, at + 1]
    node.live()
    for number in range(at + 2, at + 30):
        assert take(steps, 1) == [number]
        assert steps._hand
        until(lambda: goes_on(steps), "it goes on")


def test_a_process_without_steps_makes_first_what_is_needed_first(
    node: Node, plan: Counting
) -> None:
    first, second = rank(0), rank(1)
    end = fill(second) + in_hand.MOST
    until(lambda: fill(first) > end - 4, "the first one is further")
    node.die()
    sought, ready = len(plan.sought), threading.Event()

    def late() -> Counting:
        ready.wait(60)
        return plan

    node.plan = late
    node.live()
    for steps in (first, second):
        take(steps, 2)  # the first notices that it has died
    until(lambda: len(node.producer._expected) == 2, "both have told what they will want")
    needed = min(node.producer._expected)
    ready.set()
    until(lambda: node.producer.level().ahead > 0, "it goes on before the hands are empty")
    assert plan.sought[sought:] == [{"step": needed}]
    at = first._state["step"]
    assert take(first, 20) == list(range(at, at + 20))


def test_what_a_rank_has_in_hand_counts_as_ahead_until_it_is_taken(
    node: Node, plan: Counting
) -> None:
    steps = rank()
    at = fill(steps)
    until(lambda: node.producer.level().ahead >= ring.SMALL, "all steps ahead")
    assert max(plan.numbers) <= at + ring.SMALL
    assert node.producer.waited() < 60.0
    take(steps, 1)
    until(lambda: max(plan.numbers) >= at + ring.SMALL, "one more")


def test_a_seek_and_a_fork_forget_what_is_in_hand_and_so_does_an_end(node: Node) -> None:
    steps = rank()
    fill(steps)
    for place in (100, 3, 103, 50, 0):  # with and without an answer that is on its way
        steps.seek({"step": place})
        assert take(steps, 1 + place % 7) == list(range(place, place + 1 + place % 7))
    at = fill(steps)
    steps._owner = -1
    assert take(steps, 2) == [at, at + 1]
    fill(steps)
    node.die()
    before = memory_files()
    held = len(steps._hand)
    steps.close()
    assert held and memory_files() <= before - held


def test_without_a_process_the_last_step_in_hand_is_used_before_another_way(node: Node) -> None:
    steps = rank()
    at = fill(steps)
    node.die()
    node.answer = {"op": "refused", "why": "it has ended 5 times"}
    assert take(steps, in_hand.MOST) == list(range(at, at + in_hand.MOST))
    assert steps._state == {"step": at + in_hand.MOST}  # from which the rank goes on itself
    with pytest.raises(ProcessGone, match="it has ended 5 times"):
        steps.next()


def test_another_plan_is_an_error_after_what_is_in_hand(node: Node, plan: Counting) -> None:
    steps = rank()
    at = fill(steps)
    node.die()

    def changed() -> None:
        raise DataError("the file of some:plan has changed")

    node.plan = changed
    node.live()
    assert take(steps, in_hand.MOST) == list(range(at, at + in_hand.MOST))
    with pytest.raises(DataError, match="the file of some:plan has changed"):
        steps.next()


@pytest.mark.parametrize(("shares", "most"), [(1, 24), (8, 8), (16, 4), (64, 1), (100, 0)])
def test_descriptors_in_hand_are_few(
    monkeypatch: pytest.MonkeyPatch, shares: int, most: int
) -> None:
    hand = in_hand.StepsInHand()
    null = os.open("/dev/null", os.O_RDONLY)
    message = {"name": "a", "number": 1, "state": None, "pages": [[n, {}] for n in range(shares)]}
    assert hand.room() == in_hand.MOST
    while hand.room() or not hand:
        hand.add(message, [os.dup(null) for _ in range(shares)])
    assert len(hand) == max(1, most)
    hand.clear()
    os.close(null)


def test_random_deaths_and_seeks_lose_and_repeat_nothing(node: Node) -> None:
    chance = random.Random(24)
    ranks = [rank(0), rank(1)]
    places = [0, 0]
    for _ in range(150):
        which = chance.randrange(2)
        kind = chance.choice(("take", "take", "take", "death", "seek", "restart", "pause"))
        if kind == "death":
            node.die()
            start = threading.Timer(chance.uniform(0.0, 0.05), node.live)
            start.start()
            if chance.random() < 0.5:
                start.join()
            for number, steps in enumerate(ranks):
                count = chance.randint(0, 12)
                assert take(steps, count) == list(range(places[number], places[number] + count))
                places[number] += count
            start.join()
        elif kind == "pause":
            time.sleep(0.002)
        elif kind == "take":
            count = chance.randint(1, 12)
            assert take(ranks[which], count) == list(range(places[which], places[which] + count))
            places[which] += count
        else:
            if kind == "restart":
                ranks[which].close()
                ranks[which] = rank(which)
            places[which] = max(0, places[which] - chance.randint(0, 20))
            ranks[which].seek({"step": places[which]})
    for steps in ranks:
        steps.close()


@pytest.mark.usefixtures("node")
def test_ranks_at_different_steps_do_not_send_the_source_to_and_fro(
    plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rank(0), rank(1)
    take(first, 1), take(second, 1)
    made = Counting.next

    def slow(source: Counting) -> Any:
        time.sleep(0.01)
        return made(source)

    monkeypatch.setattr(Counting, "next", slow)
    monkeypatch.setattr(in_hand, "MOST", 0)
    first.seek({"step": 203})
    second.seek({"step": 200})
    sought = len(plan.sought)
    threads = [threading.Thread(target=take, args=(steps, 20)) for steps in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (first._state["step"], second._state["step"]) == (223, 220)
    assert len(plan.sought) - sought <= 2


def test_a_place_far_ahead_of_large_steps_is_sought(
    tmp_path: Path, plan: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counting_node.StepRing", lambda: StepRing(memory=1))
    node = Node(tmp_path, plan)
    steps = rank()
    take(steps, 2)
    steps.seek({"step": 30})
    assert take(steps, 2) == [30, 31]
    assert not {10, 20, 29} & set(plan.numbers), "steps that nobody wants"
    node.close()


@pytest.mark.usefixtures("node")
def test_a_rank_of_the_version_before_asks_for_single_steps() -> None:
    steps = rank()
    assert steps._line is not None
    for number in range(3):
        steps._line.send({"op": "next"})
        message = steps._hear(("step",), 20)
        assert (message["number"], steps._due) == (number, False)
    steps.close()
