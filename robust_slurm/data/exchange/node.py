"""This node's part in the exchange: what it serves, whom it asks, and the feeds of all lanes."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from robust_slurm.data.exchange.link import LaneLink, OwnLink, PeerLink
from robust_slurm.data.exchange.placement import numbered, preference
from robust_slurm.data.exchange.remote import RemoteFeed
from robust_slurm.data.exchange.server import LaneServer
from robust_slurm.data.exchange.shelf import LaneShelf

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Sequence

    from robust_slurm.data.lanes.feed import Feed

    Lane = tuple[str, int]

_LEAST = 1 << 20  # bytes of room for a lane


class Exchange:
    """The exchange of lanes with other nodes. Until ``place`` is called, this one reads all lanes.

    ``open_lane``: makes a Feed that reads a lane in this process, as often as it is asked to.
    ``plan``: what all nodes' processes have to agree on. ``memory``: bytes for samples that wait
    for their users.
    """

    def __init__(
        self,
        open_lane: Callable[[Lane], Feed],
        lanes: Iterable[Lane],
        listener: socket.socket,
        key: bytes,
        plan: str,
        memory: int,
    ) -> None:
        self._numbers = numbered(lanes)
        self._key = key
        self._plan = hashlib.blake2b(plan.encode(), digest_size=16).hexdigest()
        self._lock = threading.Lock()
        room = max(_LEAST, memory // max(1, len(self._numbers)))
        self._shelf = LaneShelf(open_lane, room)
        self._own = OwnLink(self._shelf)
        self._peers: dict[tuple[str, int], PeerLink] = {}
        self._nodes: list[LaneLink | None] = [self._own]
        self._server = LaneServer(listener, key, self._plan, self._numbers, self._shelf)

    def place(self, own: int, nodes: Sequence[tuple[str, int]]) -> None:
        """Note the nodes of the job: the addresses of all by their places, of which ``own`` is
        this node's. Port 0: a node without an exchange."""
        with self._lock:
            before, self._peers = self._peers, {}
            found: list[LaneLink | None] = []
            for place, (host, port) in enumerate(nodes):
                if place == own:
                    found.append(self._own)
                elif not port:
                    found.append(None)
                else:
                    peer = before.pop((host, port), None)
                    peer = peer or PeerLink(host, port, self._key, self._plan)
                    self._peers[host, port] = peer
                    found.append(peer)
            self._nodes = found
        for peer in before.values():
            peer.close()

    def feeds(self) -> dict[Lane, RemoteFeed]:
        """Return feeds of all lanes, at no position yet."""
        return {
            lane: RemoteFeed(lane, partial(self._links, number), self._own)
            for lane, number in self._numbers.items()
        }

    def owned(self) -> set[Lane]:
        """Return the lanes that this process is the first to read for all nodes now."""
        return {
            lane
            for lane, number in self._numbers.items()
            if next((link for link in self._links(number) if link.up), self._own) is self._own
        }

    def close(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.close()
        self._server.close()
        self._shelf.close()

    def _links(self, number: int) -> Iterable[LaneLink]:
        nodes = self._nodes
        for place in preference(number, len(nodes)):
            link = nodes[place]
            if link is not None:
                yield link
