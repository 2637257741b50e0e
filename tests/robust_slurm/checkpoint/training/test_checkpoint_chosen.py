"""Steps that a rank has written to the durable tier."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from robust_slurm.checkpoint.training.by_time import ByTime
from robust_slurm.checkpoint.training.chosen import WRITER_WAIT, Chosen
from robust_slurm.checkpoint.training.client import Client


class Line:
    """The store, as Chosen sees it."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = set(wanted)
        self.free = True
        self.waits: list[float] = []

    def wants(self, step: int) -> bool:
        return step in self.wanted

    def wait_free(self, slots: int, timeout: float) -> bool:
        assert slots == 1
        self.waits.append(timeout)
        return self.free


def taken(line: Line, every: int, steps: range, *, asked: bool, at_once: bool = False) -> list[int]:
    chosen = Chosen(cast(Client, line), every, asked=asked, say=print)
    chosen.at_once = at_once
    return [step for step in steps if chosen.takes(step)]


def test_under_robust_srun_the_first_and_what_is_asked_for() -> None:
    line = Line(9)
    assert taken(line, 4, range(1, 30), asked=True) == [4, 9]
    assert taken(line, 4, range(6, 30), asked=True) == [8, 9]
    assert taken(line, 4, range(11, 30), asked=True, at_once=True) == [11]
    assert taken(line, 0, range(1, 30), asked=True) == [9]
    assert line.waits == []  # training never waits there


def test_without_it_all_and_a_writer_that_is_late_is_waited_for() -> None:
    line = Line()
    assert taken(line, 10, range(1, 35), asked=False) == [10, 20, 30]
    assert line.waits == [WRITER_WAIT] * 3


def test_a_writer_that_hangs_is_waited_for_once() -> None:
    line = Line()
    chosen = Chosen(cast(Client, line), 1, asked=False, say=print)
    for step, line.free in enumerate((False, False, True, True), 1):
        assert chosen.takes(step)
    assert line.waits == [WRITER_WAIT, 0.0, 0.0, WRITER_WAIT]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_by_time_all_ranks_write_the_same_steps_whatever_their_clocks() -> None:
    """Rank 0 orders some steps ahead; rank 1 is a step behind or ahead of it."""
    store, clocks = dist.HashStore(), (Clock(), Clock())
    ranks = [
        ByTime(60.0, rank, store, "run", first=True, clock=clock)
        for rank, clock in enumerate(clocks)
    ]
    written: list[list[int]] = [[], []]
    for step in range(0, 2000, 5):  # save() is called at every fifth step, and takes 1 s
        for rank in (0, 1) if step % 3 else (1, 0):
            clocks[rank].now += 1.0 + rank / 1000
            if ranks[rank].takes(step):
                written[rank].append(step)
    assert written[0] == written[1] and written[0][0] == 0
    apart = {later - one for one, later in zip(written[0][1:], written[0][2:], strict=False)}
    assert apart == {300}  # 60 saves of 5 steps


def test_by_time_an_order_that_is_read_too_late_is_left_out() -> None:
    store, clock = dist.HashStore(), Clock()
    one, two = (ByTime(60.0, rank, store, "run", first=False, clock=clock) for rank in (0, 1))
    clock.now = 61.0
    assert not two.takes(1) and not one.takes(1)  # rank 1 looks again after a second only
    assert [step for step in range(2, 6) if one.takes(step)] == [4]
    assert not any(two.takes(step) for step in range(2, 8))
    clock.now = 63.0
    assert not two.takes(8) and not two.takes(9)
