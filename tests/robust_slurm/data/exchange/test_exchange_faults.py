"""Nodes that die, hang and come back while their lanes are used: the same samples, in order."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import exchange_nodes
import pytest
from exchange_nodes import LANES, open_lane, source_of
from listed_source import ListedSource
from waiting import until

from robust_slurm.data.exchange import link, remote
from robust_slurm.data.exchange.node import Exchange
from robust_slurm.data.exchange.placement import numbered, preference
from robust_slurm.data.exchange.remote import RemoteFeed
from robust_slurm.data.exchange.shelf import LaneShelf
from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Ref
from robust_slurm.data.sources.base import BadRecord

NODES = 4  # the last is this process
SILENCE = 0.5
FAULTS = 100
READ = LANES[::2]
SLACK = 10.0  # s that a wait may be longer on a machine that does other things, too


class Nodes:
    """Data processes on places 0 to 2, each with a listening socket that outlives it."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(NODES)]
        self.addresses = [("127.0.0.1", each.getsockname()[1]) for each in self.listeners]
        fds = [each.fileno() for each in self.listeners[:-1]]
        self._forks = subprocess.Popen(
            [sys.executable, exchange_nodes.__file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.pids: dict[int, int] = {}

    def start(self, place: int) -> None:
        assert self._forks.stdin is not None and self._forks.stdout is not None
        order = [place, self.listeners[place].fileno(), self.addresses]
        self._forks.stdin.write(json.dumps(order) + "\n")
        self._forks.stdin.flush()
        self.pids[place] = int(self._forks.stdout.readline())

    def signal(self, place: int, number: int) -> None:
        os.kill(self.pids[place], number)
        if number == signal.SIGKILL:
            del self.pids[place]

    def close(self) -> None:
        for place in list(self.pids):
            self.signal(place, signal.SIGKILL)
        assert self._forks.stdin is not None
        self._forks.stdin.close()
        self._forks.wait(60)
        for each in self.listeners:
            each.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    for place in range(NODES - 1):
        nodes.start(place)
    yield nodes
    nodes.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE", SILENCE)
    monkeypatch.setattr(link, "RETRY", 0.05)
    monkeypatch.setattr(link, "SOON", 0.05)
    monkeypatch.setattr(remote, "AVOIDED", 0.05)
    monkeypatch.setattr(remote, "AHEAD", 16)
    monkeypatch.setattr(remote, "LOW", 4)
    monkeypatch.setattr(remote, "TELL", 4)


class Reader:
    """Reads a lane as an engine does, and the same lane beside it without any exchange."""

    def __init__(self, lane: tuple[str, int], feed: RemoteFeed) -> None:
        self.feed = feed
        self.beside = open_lane(lane)
        self.open: list[tuple[Ref, int]] = []
        self.at = Position()
        self.seek()

    def seek(self) -> None:
        self.feed.seek(self.at)
        self.beside.seek(self.at)
        self.open.clear()

    def step(self, draw: random.Random) -> None:
        """Read a few; take or drop some of those that are open."""
        for _ in range(draw.randrange(1, 6)):
            meta, self.at = self.feed.next()
            assert (meta, self.at) == self.beside.next()
            (sample,) = self.beside.take([meta.ref])
            self.open.append((meta.ref, int(sample.values["tokens"][0])))
        draw.shuffle(self.open)
        done, self.open = self.open[3:], self.open[:3]
        mine = done[::2]
        taken = self.feed.take([ref for ref, _ in mine])
        assert [int(sample.values["tokens"][0]) for sample in taken] == [t for _, t in mine]
        self.feed.drop([ref for ref, _ in done[1::2]])


@pytest.mark.slow
def test_the_same_samples_in_the_same_order_whatever_dies(nodes: Nodes) -> None:
    draw = random.Random(24)
    own = exchange_nodes.exchange(nodes.listeners[-1])
    own.place(NODES - 1, nodes.addresses)
    readers = {lane: Reader(lane, feed) for lane, feed in own.feeds().items() if lane in READ}
    number, longest = numbered(LANES), 0.0
    mine = {lane for lane in LANES if next(iter(preference(number[lane], NODES))) == NODES - 1}
    until(lambda: own.owned() == mine, "the lanes that this node reads for all")
    seen = set()

    def read(steps: int) -> None:
        nonlocal longest
        for _ in range(steps):
            for reader in readers.values():
                began = time.monotonic()
                reader.step(draw)
                longest = max(longest, time.monotonic() - began)

    for _ in range(FAULTS):
        first, second, *_ = preference(number[draw.choice(READ)], NODES)
        what = draw.choice(["owner", "shadow", "both", "all"])
        places = {"owner": [first], "shadow": [second], "both": [first, second]}
        victims = {*places.get(what, range(NODES - 1))} - {NODES - 1}
        kind = draw.choice([*[signal.SIGKILL] * 5, signal.SIGSTOP])
        seen.add((what, kind))
        for place in victims:
            nodes.signal(place, kind)
        read(draw.randrange(1, 3))
        for place in victims:
            if kind == signal.SIGSTOP:
                nodes.signal(place, signal.SIGCONT)
            else:
                nodes.start(place)
        if draw.random() < 0.2:  # a restart from a position
            for reader in readers.values():
                reader.seek()
        read(draw.randrange(2))
    moves = sum(reader.feed.moves for reader in readers.values())
    for reader in readers.values():
        reader.feed.close()
        reader.beside.close()
    own.close()
    assert len(seen) == 8
    assert moves > FAULTS / 4, "other nodes were asked, and could not answer"
    assert longest < 2 * SILENCE + SLACK


class Pictures(ListedSource):
    """Records with a value that cannot be sent."""

    def read(
        self, part: int, start: int = 0
    ) -> Iterator[tuple[int, dict[str, Any] | BadRecord | None]]:
        for index, values in super().read(part, start):
            assert isinstance(values, dict)
            yield index, {**values, "picture": object()}


def test_samples_that_cannot_be_sent_are_asked_of_no_further_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_pictures(lane: tuple[str, int]) -> LocalFeed:
        made = Pictures(source_of(lane[0]).records, window=exchange_nodes.WINDOW)
        return LocalFeed(SourceLane(made, *lane, 2, 7, exchange_nodes.WINDOW), ReadBudget(1 << 18))

    asked: list[LaneShelf] = []
    take = LaneShelf.take

    def counted(shelf: LaneShelf, *what: Any) -> Any:
        asked.append(shelf)
        return take(shelf, *what)

    monkeypatch.setattr(LaneShelf, "take", counted)
    monkeypatch.setattr(link, "SILENCE", 60.0)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(NODES)]
    given = exchange_nodes.KEY, exchange_nodes.PLAN, 1 << 16
    made = [Exchange(open_pictures, LANES, listener, *given) for listener in listeners]
    for place, each in enumerate(made):
        each.place(place, [("127.0.0.1", other.getsockname()[1]) for other in listeners])
    number = numbered(LANES)
    lane = next(each for each in LANES if next(iter(preference(number[each], NODES))) == 0)
    feed, beside = made[-1].feeds()[lane], open_lane(lane)
    beside.seek(Position())
    feed.seek(Position())
    until(lambda: feed._choose() is not feed._own, "the node that reads the lane")
    for _ in range(40):
        meta, after = feed.next()
        assert (meta, after) == beside.next()
        (sample,) = feed.take([meta.ref])
        assert sample.meta == meta and type(sample.values["picture"]) is object
    others = [shelf for shelf in asked if shelf is not made[-1]._shelf]
    assert len(others) == 1, "each of them would have to read it"
    feed.close()
    beside.close()
    for each, listener in zip(made, listeners, strict=True):
        each.close()
        listener.close()
