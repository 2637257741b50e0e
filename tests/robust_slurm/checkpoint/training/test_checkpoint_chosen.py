"""Steps that a rank has written to the durable tier."""

from __future__ import annotations

from typing import cast

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
    chosen = Chosen(cast(Client, line), every, asked=asked)
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
    chosen = Chosen(cast(Client, line), 1, asked=False)
    for step, line.free in enumerate((False, False, True, True), 1):
        assert chosen.takes(step)
    assert line.waits == [WRITER_WAIT, 0.0, 0.0, WRITER_WAIT]
