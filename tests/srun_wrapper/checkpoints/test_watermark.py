"""The newest step that all ranks have: counted, so that no rank frees the only common one."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import msgspec
import pytest

from robust_slurm.checkpoint.copying.form import Form
from robust_slurm.checkpoint.copying.slots import Ring
from robust_slurm.checkpoint.format.layout import Entry, Snapshot
from srun_wrapper.checkpoints.watermark import OPEN, Watermark
from srun_wrapper.protocol.checkpoint_messages import Saved


@pytest.mark.parametrize(
    ("reports", "step", "passed"),
    [
        ([[10], [10]], 10, 10),
        ([[10, 12], [10, 11]], 10, 11),  # 11 and 12 are each left out by one
        ([[10, 12, 13], [10, 11, 13]], 13, 13),
        ([[10, 12], [11, 13]], -1, 12),  # there is none
        ([[10], []], -1, -1),  # one has not said anything
        ([[], [10]], -1, -1),
    ],
)
def test_the_step_that_all_have(reports: list[list[int]], step: int, passed: int) -> None:
    mark = Watermark()
    for rank, steps in enumerate(reports):
        for each in steps:
            mark.add(rank, each, [each])
    assert mark.advance(2) == (passed >= 0)
    assert (mark.step, mark.passed) == (step, passed)
    assert not mark.advance(2)


def test_a_step_that_turned_out_unusable_is_passed_but_not_had() -> None:
    mark = Watermark()
    mark.add(0, 5, [5])
    mark.add(1, 5, [])
    assert mark.advance(2)
    assert (mark.step, mark.passed) == (-1, 5)


def test_what_is_said_twice_counts_once() -> None:
    mark = Watermark()
    mark.add(0, 5, [5])
    mark.add(0, 5, [5])
    mark.add(1, 4, [4])
    assert mark.advance(2)
    assert (mark.step, mark.passed) == (-1, 4)


def test_a_lost_report_costs_no_step_as_the_next_repeats_it() -> None:
    mark = Watermark()
    mark.add(0, 5, [4, 5])
    mark.add(1, 6, [4, 4, 6])
    assert mark.advance(2)
    assert (mark.step, mark.passed) == (4, 5)
    mark.add(0, 6, [4, 5, 6])
    assert mark.advance(2)
    assert (mark.step, mark.passed) == (6, 6)


def test_a_rank_that_begins_anew_is_waited_for() -> None:
    mark = Watermark()
    for rank in range(2):
        mark.add(rank, 20, [20])
    assert mark.advance(2) and mark.step == 20
    for rank in range(2):
        mark.began(rank)
    assert (mark.step, mark.passed) == (-1, -1)
    mark.add(0, 11, [11])
    assert not mark.advance(2)
    mark.add(1, 11, [11])
    assert mark.advance(2) and mark.step == 11


def test_a_rank_that_is_stuck_costs_no_memory() -> None:
    mark = Watermark()
    mark.add(0, 1, [1])
    for step in range(1, 10_000):
        mark.add(1, step, [step])
    assert len(mark._count) <= OPEN
    assert mark.advance(2) and mark.passed == 1


FORM = Form(
    [Entry("t", "U8", (8,), "t", (8,), (0,), "private")],
    (0,),
    Snapshot(0, 0, 1, 0, "job7", {}, (0,), None, ()),
)


class Rank:
    """Two real slots, and what Client and Saver know."""

    def __init__(self, directory: Path, number: int, at: int) -> None:
        self.ring = Ring(directory, number, {}, own=2, extra=0)
        self.at, self.safe, self.have = at, -1, list[int]()
        self.news = deque[tuple[int, int]]()
        self.restart(at)
        self.save(at)

    def restart(self, step: int) -> None:
        self.ring.abandon(step)
        self.at, self.everywhere = step, step
        self.last = self.passed = self.safe = -1
        self.have.clear()

    def save(self, step: int) -> None:
        slot = self.ring.take((), self.everywhere)
        assert slot is not None
        slot.fit(FORM)
        slot.complete(FORM.header(step, "{}"), step)
        self.last = step

    def hear(self) -> None:
        step, passed = self.news.popleft()
        if passed <= self.last:
            self.everywhere = step if step >= 0 else self.everywhere
            self.passed = passed

    @property
    def steps(self) -> set[int]:
        return {slot.step for slot in self.ring.slots if slot.step is not None}


@pytest.mark.parametrize("seed", range(6))
def test_no_rank_frees_the_newest_step_that_all_have(seed: int, tmp_path: Path) -> None:
    """Ranks leave steps out at random, are heard late and hear late, begin anew, become others."""
    chance = random.Random(seed)
    mark = Watermark()
    world = [Rank(tmp_path, number, 0) for number in range(4)]
    for rank in world:
        rank.last = -1

    def common() -> int:
        return max(set.intersection(*(rank.steps for rank in world)), default=-1)

    best, moved, restarts = 0, 0, 0
    for _ in range(20_000):
        rank = chance.choice(world)
        what = chance.random()
        if what < 0.5:
            behind = min(other.at for other in world)
            if rank.at > behind or (rank.last >= 0 and rank.passed < rank.last):
                continue  # others' gradients are missing, or it waits
            rank.at += 1
            if chance.random() < 0.7:
                rank.save(rank.at)
                moved += 1
        elif what < 0.7:
            if rank.last > rank.safe:
                rank.safe = rank.last
                rank.have.append(rank.last)
        elif what < 0.8:
            if rank.safe >= 0:
                mark.add(world.index(rank), rank.safe, rank.have)
                rank.have.clear()
        elif what < 0.85:
            if mark.advance(len(world)):
                for other in world:
                    other.news.append((mark.step, mark.passed))
        elif what < 0.998:
            if rank.news:
                rank.hear()
        elif what < 0.999:  # within the epoch: what is on its way still comes
            restarts += 1
            for number, other in enumerate(world):
                other.restart(best)
                mark.began(number)
        else:  # a new epoch with another world
            restarts += 1
            mark = Watermark()
            for other in world:
                other.ring.remove()
            count = chance.randrange(2, 6)
            world = [Rank(tmp_path, number, best) for number in range(count)]
            for other in world:
                other.last = -1
        assert common() >= best, [(r.steps, r.everywhere, r.passed, r.last) for r in world]
        best = max(best, common())
    assert moved > 150 and best > 10 and restarts > 5


def test_a_report_says_what_an_older_one_would_have_said() -> None:
    def saved(epoch: int, step: int) -> Saved:
        return Saved(epoch, 0, step, step, 9, 0.0, 0.0, ((step, 1),), safe=step, have=(step,))

    merged = saved(1, 6).after(saved(1, 5))
    assert (merged.step, merged.same, merged.have) == (6, ((5, 1), (6, 1)), (5, 6))
    repeated = msgspec.structs.replace(saved(1, 7), have=(6, 7)).after(merged)
    assert repeated.have == (5, 6, 7)
    assert saved(2, 6).after(saved(1, 5)) == saved(2, 6)
    assert saved(1, 5).after(None) == saved(1, 5)
