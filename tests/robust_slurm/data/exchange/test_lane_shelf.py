"""A lane that many use: read once, in bounded memory, whatever a user does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from exchange_nodes import LANES, open_lane, source_of
from waiting import until

from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange import shelf as shelves
from robust_slurm.data.exchange.shelf import LaneReader, LaneShelf, ReaderEnded
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Sample

LANE = LANES[0]
ONE = 260  # bytes of a sample, about
ROOM = 20


class Opened:
    """Opens feeds, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, lane: tuple[str, int]) -> LocalFeed:
        self.count += 1
        return open_lane(lane)


@pytest.fixture
def opened() -> Opened:
    return Opened()


@pytest.fixture
def shelf(opened: Opened) -> Iterator[LaneShelf]:
    shelf = LaneShelf(opened, ROOM * ONE)
    yield shelf
    shelf.close()


def reader(shelf: LaneShelf) -> LaneReader:
    (found,) = shelf._readers[LANE]
    return found


def read(
    shelf: LaneShelf, user: object, at: Position, count: int, passing: bool = True
) -> list[tuple[Meta, Position]]:
    got: list[tuple[Meta, Position]] = []
    while len(got) < count:
        passed = at if passing else Position()
        got += shelf.next(user, LANE, at, passed, count - len(got)).result(60)
        at = got[-1][1]
    return got


def test_a_lane_is_read_once_and_a_user_that_stands_still_costs_no_memory(
    shelf: LaneShelf, opened: Opened
) -> None:
    beside = open_lane(LANE)
    beside.seek(Position())
    expected = [beside.next() for _ in range(200)]
    a, b, slow = object(), object(), object()
    assert read(shelf, slow, Position(), 1) == expected[:1]
    assert read(shelf, a, Position(), 200) == expected
    held = reader(shelf)
    assert len(held._entries) <= ROOM and held._size <= ROOM * ONE
    at = expected[190][1]
    assert read(shelf, b, at, 9) == expected[191:200]
    assert opened.count == 1

    refs = [meta.ref for meta, _ in (expected[3], expected[195])]
    samples = shelf.take(LANE, refs).result(60)
    assert [sample.meta for sample in samples] == [expected[3][0], expected[195][0]]
    assert opened.count == 2, "one had gone, and was read again"

    assert read(shelf, slow, expected[0][1], 10) == expected[1:11], "it goes on where it was"
    assert len(shelf._readers[LANE]) == 2
    read(shelf, slow, expected[10][1], 185)
    assert read(shelf, slow, expected[195][1], 1) == expected[196:197]
    assert opened.count == 3 and len(shelf._readers[LANE]) == 1, "and reads with the others again"
    beside.close()


def test_a_shadow_reads_ahead_of_the_slowest_and_a_dead_one_holds_nothing_up(
    shelf: LaneShelf, opened: Opened
) -> None:
    beside = open_lane(LANE)
    beside.seek(Position())
    expected = [beside.next() for _ in range(100)]
    a, b = object(), object()
    for user in (a, b):
        shelf.passed(user, LANE, Position())
    until(lambda: reader(shelf)._size >= (ROOM - 1) * ONE, "it has read ahead")
    shelf.passed(a, LANE, expected[49][1])
    assert reader(shelf).holds(expected[5][1]), "b may want it"
    shelf.passed(b, LANE, expected[9][1])
    assert not reader(shelf).holds(expected[5][1])
    shelf.leave(b)
    until(lambda: reader(shelf).holds(expected[60][1]), "nobody wants what a has passed")
    assert not reader(shelf).holds(expected[40][1])
    answer = shelf.next(a, LANE, expected[49][1], expected[49][1], 5)
    assert answer.done(), "it is there before it is asked for"
    assert answer.result() == expected[50:55]
    assert opened.count == 1
    beside.close()


def test_a_decode_that_exits_when_read_again_is_told_and_the_next_is_read(
    shelf: LaneShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (meta, _) = read(shelf, object(), Position(), 1)[0]
    again = LocalFeed.again

    def exits(*_: object) -> None:
        monkeypatch.setattr(LocalFeed, "again", again)
        raise SystemExit(1)

    monkeypatch.setattr(LocalFeed, "again", exits)
    monkeypatch.setattr(LaneReader, "sample", lambda *_: None)
    with pytest.raises(DataError, match="SystemExit: 1"):
        shelf.take(LANE, [meta.ref]).result(60)
    assert shelf.take(LANE, [meta.ref]).result(60)[0].meta == meta


def test_a_lane_that_fails_is_told_and_tried_again(
    shelf: LaneShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [DataError("one"), DataError("two")]

    def fail(lane: tuple[str, int]) -> LocalFeed:
        if broken:
            raise broken.pop(0)
        return open_lane(lane)

    shelf._open = fail
    user = object()
    for why in ("one", "two"):
        with pytest.raises(DataError, match=why):
            shelf.next(user, LANE, Position(), Position(), 1).result(60)
    assert shelf.next(user, LANE, Position(), Position(), 1).result(60)

    monkeypatch.setattr(shelves, "READERS", 1)
    waits = reader(shelf)
    waits.end("the lane is read elsewhere now")
    with pytest.raises(ReaderEnded):
        waits.next(user, Position(), Position(), 1).result(60)
    source = source_of(LANE[0])
    assert len(source.parts()) == 5
    shelf.close()
    with pytest.raises(DataError, match="ends"):
        shelf.next(user, LANE, Position(), Position(), 1).result(60)


def test_users_that_wait_at_more_places_than_there_are_readers_do_not_end_one_another(
    shelf: LaneShelf, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that comes back as the first to read a lane is asked by all at once."""
    beside = open_lane(LANE)
    beside.seek(Position())
    expected = [beside.next() for _ in range(400)]
    beside.close()
    wait, next_window = threading.Event(), SourceLane.next_window

    def slow(lane: SourceLane) -> list[tuple[Sample, Position]]:
        assert wait.wait(60)
        return next_window(lane)

    monkeypatch.setattr(SourceLane, "next_window", slow)
    users = {object(): at for at in (300, 200, 100, 0)}
    answers = {}
    for user, at in users.items():
        after = expected[at][1]
        answers[user] = shelf.next(user, LANE, after, after, 1)
    assert not any(answer.done() for answer in answers.values()), "nobody's reader was ended"
    assert len(shelf._readers[LANE]) == opened.count == len(users)
    wait.set()
    for user, at in users.items():
        assert answers[user].result(60) == expected[at + 1 : at + 2]
    late = object()
    assert read(shelf, late, expected[350][1], 1) == expected[351:352]
    assert len(shelf._readers[LANE]) == shelves.READERS, "those that nobody waits for have gone"
