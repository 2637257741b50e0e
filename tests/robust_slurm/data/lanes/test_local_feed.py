"""A feed of this process: what its thread reads ahead, within the budget, errors and hangs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from itertools import islice
from types import SimpleNamespace

import pytest
from listed_source import Gate, ListedSource, numbered
from waiting import until

from robust_slurm.data.arrays import OVERHEAD
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import budget as budget_module
from robust_slurm.data.lanes import local
from robust_slurm.data.lanes.budget import READERS, ReadBudget, ReadClaim
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sources.base import BadRecord

ONE = 4 + OVERHEAD  # bytes of a sample of one token


def lane_of(source: ListedSource, window: int = 4) -> SourceLane:
    return SourceLane(source, "web", 0, 1, 7, window)


def ahead(feed: LocalFeed) -> int:
    """The number of samples that are read and not given yet."""
    assert feed._reader is not None
    return len(feed._reader._ready)


@pytest.fixture
def budget() -> Iterator[ReadBudget]:
    budget = ReadBudget(100 * ONE)
    yield budget
    assert budget.used == 0, "every byte was given back"


def test_a_feed_gives_what_its_lane_gives_and_hands_samples_out_once(budget: ReadBudget) -> None:
    feed = LocalFeed(lane_of(numbered([10, 7])), budget)
    expected = list(islice(lane_of(numbered([10, 7])), 40))
    feed.seek(Position())
    metas = [feed.next() for _ in range(20)]
    assert metas == [(sample.meta, position) for sample, position in expected[:20]]
    refs = [meta.ref for meta, _ in metas]
    taken = feed.take([refs[5]._replace(piece=1), refs[3]])
    assert [sample.values for sample in taken] == [expected[5][0].values, expected[3][0].values]
    feed.drop([refs[0]])
    with pytest.raises(KeyError):
        feed.take([refs[0]])
    assert [sample.values for sample in feed.again([refs[0], refs[9]])] == [
        expected[0][0].values,
        expected[9][0].values,
    ]
    feed.seek(expected[29][1])
    assert feed.next() == (expected[30][0].meta, expected[30][1])
    feed.close()
    with pytest.raises(DataError, match="closed"):
        feed.next()


def test_feeds_read_ahead_within_their_budget_and_a_hungry_one_beyond_it() -> None:
    budget = ReadBudget(24 * ONE)
    feeds = [LocalFeed(lane_of(numbered([400])), budget) for _ in range(2)]
    for feed in feeds:
        feed.seek(Position())
    until(lambda: sum(map(ahead, feeds)) >= 24, "a full budget", 30)
    refs = [feeds[0].next()[0].ref for _ in range(40)]
    until(lambda: ahead(feeds[0]) == 0, "nothing left ahead", 30)
    assert budget.used > 40 * ONE, "given samples count until they are taken"
    feeds[0].drop(refs)
    until(lambda: sum(map(ahead, feeds)) >= 24, "a full budget", 30)
    assert budget.used <= budget.limit + 4 * ONE, "the first window of one came later"
    for feed in feeds:
        feed.close()
    assert budget.used == 0


def test_what_will_run_out_first_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, forced, now = ReadBudget(0), [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time)
    monkeypatch.setattr(local, "time", clock)
    feeds = [LocalFeed(lane_of(numbered([4000])), budget) for _ in range(6)]
    for feed in feeds:
        feed.seek(Position())
    until(lambda: len(budget._waiting) == len(feeds), "a window of each", 30)
    budget.limit = 32 * ONE  # six windows of four, and two more
    force = budget.force

    def noted(claim: ReadClaim) -> None:
        forced.append(claim in budget._waiting)
        force(claim)

    monkeypatch.setattr(budget, "force", noted)
    for draw in range(300):
        until(lambda: len(budget._waiting) == len(feeds), "a full budget", 30, every=0.001)
        feed = feeds[0] if draw % 6 else feeds[1 + draw // 6 % 5]
        feed.drop([feed.next()[0].ref])
        now[0] += 1.0
    assert sum(forced) <= 20, "of 75 windows, while it was not known who is drawn from how often"
    for feed in feeds:
        feed.close()
    assert budget.used == 0


def test_few_feeds_read_at_a_time_but_for_those_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "SLOW", 1000.0)
    budget = ReadBudget()
    gates = [Gate(0, 0) for _ in range(READERS + 1)]
    feeds = [LocalFeed(lane_of(numbered([20])), budget) for _ in gates]
    for feed, gate in zip(feeds, gates, strict=True):
        feed.lane.source.before = gate  # type: ignore[attr-defined]
        feed.seek(Position())
    until(lambda: sum(gate.reached.is_set() for gate in gates) == READERS, "all at work", 30)
    waiting = next(n for n, gate in enumerate(gates) if not gate.reached.is_set())
    gates[waiting].opened.set()
    assert feeds[waiting].next()[0].tokens == 1, "whoever is waited for reads"
    monkeypatch.setattr(budget_module, "SLOW", 0.0)
    feeds[waiting].drop([])
    until(lambda: ahead(feeds[waiting]) > 4, "a reader more", 30)
    for feed, gate in zip(feeds, gates, strict=True):
        feed.close()
        gate.opened.set()
    assert budget.used == 0


def test_a_small_source_is_not_read_ahead_without_end(budget: ReadBudget) -> None:
    feed = LocalFeed(lane_of(numbered([3])), budget)
    feed.seek(Position())
    epochs = [feed.next()[0].ref.epoch for _ in range(9)]
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    until(lambda: ahead(feed) == 9, "nine ahead", 30)
    feed.close()


def test_an_error_is_given_after_the_samples_before_it_and_again(budget: ReadBudget) -> None:
    source = ListedSource([[0, 1, 2, 3, 4, BadRecord("part0", 5, "no JSON"), 6]])
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position())
    for _ in range(4):
        feed.next()
    for _ in range(2):
        with pytest.raises(DataError, match="part0: record 5: no JSON"):
            feed.next()
    feed.close()


def test_an_unforeseen_error_names_its_place(budget: ReadBudget) -> None:
    source = numbered([9])
    source.before = lambda part, record: 1 // (6 - record)
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position(0, 0, 4))
    with pytest.raises(DataError, match="part0: record 6: ZeroDivisionError"):
        feed.next()
    feed.close()


def test_a_decode_that_exits_does_not_leave_the_training_waiting(budget: ReadBudget) -> None:
    source = numbered([9])
    source.before = lambda part, record: sys.exit("enough")
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position())
    with pytest.raises(DataError, match="part0: record 0: SystemExit: enough"):
        feed.next()
    feed.close()


def test_a_thread_that_cannot_start_is_told_at_once(
    budget: ReadBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    feeds = [LocalFeed(lane_of(numbered([9])), budget) for _ in range(READERS + 1)]
    for feed in feeds:  # the last one is waiting for its turn
        feed.seek(Position())
    for feed in feeds:
        with pytest.raises(DataError, match="web: no thread to read it: can't start new thread"):
            feed.next()
        feed.close()


def test_a_hang_is_told_after_patience_and_the_feed_goes_on_when_it_ends(
    budget: ReadBudget,
) -> None:
    source = numbered([20], patience=0.3)
    source.before = gate = Gate(0, 6)
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position())
    given = [feed.next() for _ in range(4)]
    for _ in range(2):
        with pytest.raises(SourceStalled, match=r"web: part0: record 6: nothing for \d+ s"):
            feed.next()
    gate.opened.set()
    while len(given) < 20:
        given.append(feed.next())
    assert [m for m, _ in given] == [s.meta for s, _ in islice(lane_of(numbered([20])), 20)]
    feed.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_was_suspended_has_not_waited(
    budget: ReadBudget, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time)
    monkeypatch.setattr(local, "time", clock)
    monkeypatch.setattr(local, "TURN", 0.02)
    source = numbered([9], patience=0.05)
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position())
    ref = feed.next()[0].ref
    source.before = gate = Gate(0, ref.record)
    feed.seek(Position())
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: feed.again([ref]) if again else feed.next())
        assert gate.reached.wait(60)
        for _ in range(3):
            now[0] += 1000.0
            with pytest.raises(NotInTime):
                waits.result(0.2)
        gate.opened.set()
        waits.result(60)
    feed.close()


def test_seek_and_close_leave_a_read_that_hangs_behind(budget: ReadBudget) -> None:
    others = set(threading.enumerate())  # a test before may have left one that hangs, too
    source = numbered([20])
    source.before = gate = Gate(0, 6)
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position(0, 0, 4))
    assert gate.reached.wait(60)
    feed.seek(Position(0, 0, 8))
    assert feed.next()[0].ref.record >= 8
    feed.close()
    assert budget.used == 0
    own = [t for t in set(threading.enumerate()) - others if t.name == "data web/0"]
    assert own
    gate.opened.set()
    until(lambda: not any(t.is_alive() for t in own), "the end of its thread", 30)


def test_reading_again_has_patience_too(budget: ReadBudget) -> None:
    source = numbered([20], patience=0.2)
    feed = LocalFeed(lane_of(source), budget)
    feed.seek(Position())
    ref = feed.next()[0].ref
    source.before = gate = Gate(0, ref.record)
    with pytest.raises(SourceStalled, match="nothing for"):
        feed.again([ref])
    gate.opened.set()
    feed.close()
