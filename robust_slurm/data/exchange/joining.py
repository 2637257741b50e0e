"""A data process's feeds: those of the exchange, if it has been told of enough other nodes."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING

from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange.node import Exchange
from robust_slurm.data.exchange.placement import LEAST, MOST
from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.say import say
from robust_slurm.data.steps import local_feeds, opener

if TYPE_CHECKING:
    from collections.abc import Mapping

    from robust_slurm.data.lanes.feed import Feed
    from robust_slurm.data.lanes.local import LocalFeed
    from robust_slurm.data.plan import Plan
    from robust_slurm.data.steps import OpenFeed

READING = 1 << 26  # bytes that are read, before they wait
WAITING = 1 << 28  # bytes that wait for users

Nodes = tuple[int, "list[tuple[str, int]]"]


class Joining:
    """The exchange of a data process, begun once it knows the plan and enough other nodes.

    ``order``: the descriptor of the socket on which other nodes ask for lanes, and the key; None
    where robust-task has given none.
    """

    def __init__(self, order: tuple[int, str] | None) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._nodes: Nodes | None = None
        self._plan: Plan | None = None
        self._code = ""
        self._open: OpenFeed | None = None
        self._exchange: Exchange | None = None
        # That read here, the newest of each lane.
        self._opened: dict[tuple[str, int], LocalFeed] = {}

    def place(self, said: object) -> None:
        """Take the value of ``placement.VARIABLE`` from a rank. Any thread may call it."""
        nodes = nodes_of(said)
        with self._lock:
            if nodes is not None and nodes != self._nodes:
                self._nodes = nodes
                self._join()

    def know(self, plan: Plan, code: str, open_feed: OpenFeed | None = None) -> None:
        """Serve the lanes of this plan, to other nodes' processes of the same ``code`` from now
        on: another version decodes the same files to other samples. ``open_feed``: makes feeds
        that this process reads."""
        make = open_feed or opener(plan)

        def opened(lane: tuple[str, int], budget: ReadBudget) -> LocalFeed:
            self._opened[lane] = feed = make(lane, budget)
            return feed

        with self._lock:
            self._plan, self._code, self._open = plan, code, opened
            self._join()

    def feeds(self, plan: Plan) -> Mapping[tuple[str, int], Feed]:
        """Return feeds of all lanes of the process's plan."""
        with self._lock:
            if self._exchange is not None:
                return self._exchange.feeds()
            return local_feeds(plan, self._open)

    def figures(self) -> tuple[bool, dict[str, tuple[int, int]]]:
        """Return whether each node reads all lanes for itself, and of each source the number of
        records that were read here and of the bad ones among them. Where lanes are shared, those
        count that this node reads for all, not those that it reads as the shadow."""
        with self._lock:
            exchange, feeds = self._exchange, dict(self._opened)
        lanes = feeds.keys() if exchange is None else exchange.owned()
        found: dict[str, tuple[int, int]] = {}
        for lane, feed in feeds.items():
            if lane in lanes:
                read = feed.lane.tally.figures()
                records, bad = found.get(lane[0], (0, 0))
                found[lane[0]] = records + read.records, bad + read.bad
        return exchange is None, found

    def _join(self) -> None:
        if self._order is None or self._nodes is None or self._plan is None or self._open is None:
            return
        try:
            if self._exchange is None:
                self._exchange = _exchange(self._plan, self._code, self._open, *self._order)
            self._exchange.place(*self._nodes)
        except (DataError, OSError, RuntimeError) as err:  # RuntimeError: no thread
            say(f"lanes of other nodes are not used by this one: {err}")


def nodes_of(said: object) -> Nodes | None:
    """Return this node's place and all nodes' addresses; None for too few or many, or nonsense."""
    try:
        place, given = json.loads(said) if isinstance(said, str) else (0, [])
        nodes = [(str(host), int(port)) for host, port in given]
    except (ValueError, TypeError, RecursionError):
        return None
    known = type(place) is int and LEAST <= len(nodes) <= MOST and 0 <= place < len(nodes)
    return (place, nodes) if known else None


def _exchange(plan: Plan, code: str, open_feed: OpenFeed, descriptor: int, key: str) -> Exchange:
    budget = ReadBudget(READING)
    lanes = [(name, lane) for name, count in plan.lanes().items() for lane in range(count)]
    listener = socket.socket(fileno=os.dup(descriptor))  # a failure closes its own copy
    whose = json.dumps([code, plan.fingerprint()], sort_keys=True)
    open_lane = lambda lane: open_feed(lane, budget)  # noqa: E731
    return Exchange(open_lane, lanes, listener, bytes.fromhex(key), whose, WAITING)
