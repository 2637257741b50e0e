"""A data process's feeds: of the exchange, when it has been told of other nodes."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING

from robust_slurm.data.exchange.node import Exchange
from robust_slurm.data.lanes.budget import Budget
from robust_slurm.data.lanes.lane import Lane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.steps import local_feeds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from robust_slurm.data.lanes.feed import Feed
    from robust_slurm.data.plan import Plan

VARIABLE = "ROBUST_DATA_NODES"
"""In the ranks' environment: JSON, this node's place and all nodes' (address, port)."""
READING = 1 << 29  # bytes that are read ahead
WAITING = 1 << 29  # bytes that wait for users
_NODES = 1 << 16

Nodes = tuple[int, "list[tuple[str, int]]"]


class Joining:
    """``order``: the descriptor of the socket on which other nodes ask for lanes, and the key; None
    where robust-task has given none."""

    def __init__(self, order: tuple[int, str] | None) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._nodes: Nodes | None = None
        self._exchange: Exchange | None = None

    def place(self, said: object) -> None:
        """Take what a rank has in VARIABLE. Any thread."""
        nodes = nodes_of(said)
        with self._lock:
            if nodes is not None and nodes != self._nodes:
                self._nodes = nodes
                if self._exchange is not None:
                    self._exchange.place(*nodes)

    def feeds(self, plan: Plan) -> Mapping[tuple[str, int], Feed]:
        """Return feeds of all lanes of the process's plan."""
        with self._lock:
            if self._order is None or self._nodes is None:
                return local_feeds(plan)
            if self._exchange is None:
                self._exchange = self._join(plan, *self._order)
                self._exchange.place(*self._nodes)
            return self._exchange.feeds()

    def _join(self, plan: Plan, descriptor: int, key: str) -> Exchange:
        budget, counts = Budget(READING), plan.lanes()

        def open_lane(lane: tuple[str, int]) -> Feed:
            name, number = lane
            source = plan.sources[name]
            window = source.options.window
            return LocalFeed(Lane(source, name, number, counts[name], plan.seed, window), budget)

        lanes = [(name, lane) for name, count in counts.items() for lane in range(count)]
        listener = socket.socket(fileno=descriptor)
        whose = json.dumps(plan.fingerprint(), sort_keys=True)
        return Exchange(open_lane, lanes, listener, bytes.fromhex(key), whose, WAITING)


def nodes_of(said: object) -> Nodes | None:
    """Return this node's place and all nodes' addresses; None for no other node, or nonsense."""
    try:
        place, given = json.loads(said) if isinstance(said, str) else (0, [])
        nodes = [(str(host), int(port)) for host, port in given]
    except (ValueError, TypeError, RecursionError):
        return None
    known = type(place) is int and 0 <= place < len(nodes) <= _NODES
    return (place, nodes) if known and len(nodes) > 1 else None
