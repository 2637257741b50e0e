"""Ways to ask a node's lanes: another node's over a connection, this process's own directly."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange.server import BEAT
from robust_slurm.data.exchange.wire import (
    BrokenLine,
    CannotSend,
    FrameSocket,
    unpack_metas,
    unpack_samples,
)
from robust_slurm.frames.wire import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from robust_slurm.data.exchange.shelf import LaneShelf
    from robust_slurm.data.lanes.position import Position
    from robust_slurm.data.sample import Meta, Ref, Sample

    Lane = tuple[str, int]
    Metas = Future[list[tuple[Meta, Position]]]
    Samples = Future[list[Sample]]

SILENCE = float(os.environ.get("ROBUST_TEST_DATA_SILENCE", "2"))
"""Seconds without a message of a node until its lanes are read elsewhere."""
RETRY = 2.0  # s until a node that is away is tried again
SOON = 0.2  # the same, while it may be starting: for twice SILENCE


class NodeAway(DataError):
    """The node does not answer, or cannot give what is asked."""


class CannotGive(NodeAway):
    """Samples have values that the wire has no form for: no node can give them to another."""


class LaneLink(Protocol):
    """A node's lanes. Answers are Futures that fail with DataError."""

    @property
    def up(self) -> bool:
        """Return True if it answers."""

    def wait_up(self) -> None:
        """Wait until it answers, while it may be starting."""

    def next(self, lane: Lane, after: Position, passed: Position, most: int) -> Metas:
        """Ask what follows ``after``; all before ``passed`` is not needed any more."""

    def take(self, lane: Lane, refs: Sequence[Ref]) -> Samples:
        """Ask for samples; the answer has all of them, or only the first ones."""

    def passed(self, lane: Lane, position: Position) -> None:
        """Tell how far this node is, so that the other can go on from there."""

    def leave(self, lane: Lane) -> None:
        """Tell that the lane is not wanted from it any more."""


class OwnLink:
    """This process's own lanes: they are always there."""

    up = True

    def __init__(self, shelf: LaneShelf) -> None:
        self._shelf = shelf

    def wait_up(self) -> None:
        pass

    def next(self, lane: Lane, after: Position, passed: Position, most: int) -> Metas:
        return self._shelf.next(self, lane, after, passed, most)

    def take(self, lane: Lane, refs: Sequence[Ref]) -> Samples:
        return self._shelf.take(lane, refs)

    def passed(self, lane: Lane, position: Position) -> None:
        self._shelf.passed(self, lane, position)

    def leave(self, lane: Lane) -> None:
        self._shelf.leave(self, lane)


class PeerLink:
    """Another node's lanes, over a connection that is made again when it breaks."""

    def __init__(self, host: str, port: int, key: bytes, plan: str) -> None:
        self.place = (host, port)
        self.up = False
        self._key = key
        self._plan = plan
        self._lock = threading.Lock()
        self._line: FrameSocket | None = None
        self._asked: dict[int, tuple[Future[Any], Callable[[dict[str, Any], bytes], Any]]] = {}
        self._ids = itertools.count(1)
        self._up_once = threading.Event()
        self._started_until = time.monotonic() + 2 * SILENCE
        self._stop = threading.Event()
        threading.Thread(target=self._run, name=f"data-peer {host}", daemon=True).start()

    def wait_up(self) -> None:
        self._up_once.wait(max(0.0, self._started_until - time.monotonic()))

    def next(self, lane: Lane, after: Position, passed: Position, most: int) -> Metas:
        message = {"op": "next", "after": after, "passed": passed, "most": most}
        return self._ask(lane, message, lambda _head, body: unpack_metas(lane, body))

    def take(self, lane: Lane, refs: Sequence[Ref]) -> Samples:
        message = {"op": "take", "refs": [ref[2:5] for ref in refs]}
        return self._ask(
            lane, message, lambda head, body: unpack_samples(lane, head.get("samples"), body)
        )

    def passed(self, lane: Lane, position: Position) -> None:
        self._tell({"op": "passed", "source": lane[0], "lane": lane[1], "at": position})

    def leave(self, lane: Lane) -> None:
        self._tell({"op": "leave", "source": lane[0], "lane": lane[1]})

    def close(self) -> None:
        self._stop.set()
        self._up_once.set()
        with self._lock:
            if self._line is not None:
                self._line.close()

    # -- inside

    def _ask(
        self,
        lane: Lane,
        message: dict[str, Any],
        understand: Callable[[dict[str, Any], bytes], Any],
    ) -> Future[Any]:
        future: Future[Any] = Future()
        asked = next(self._ids)
        with self._lock:
            if not self.up:
                future.set_exception(NodeAway("it is away"))
                return future
            self._asked[asked] = (future, understand)
        self._tell({**message, "source": lane[0], "lane": lane[1], "id": asked})
        return future

    def _tell(self, message: dict[str, Any]) -> None:
        """Send it; if it cannot be sent, all that is asked fails with the connection."""
        line = self._line
        if line is None or not self.up:
            return
        try:
            line.send(message)
        except (BrokenLine, CannotSend):
            line.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._connected()
            except (BrokenLine, OSError):
                pass  # tried again
            finally:
                self._lost()
            starting = time.monotonic() < self._started_until
            self._stop.wait(SOON if starting else RETRY)

    def _connected(self) -> None:
        """Connect, and take answers until the connection ends."""
        sock = socket.create_connection(self.place, timeout=SILENCE)
        line = FrameSocket(sock, Codec(self._key, server=False), silence=SILENCE)
        try:
            line.greet()
            line.send({"op": "hello", "plan": self._plan})
            line.receive()  # a sign of life: it has the same plan
            with self._lock:
                self._line, self.up = line, not self._stop.is_set()
            self._up_once.set()
            told = time.monotonic()
            while not self._stop.is_set():
                self._understand(*line.receive())
                if time.monotonic() - told > BEAT:
                    told = time.monotonic()
                    line.send({"op": "here"})
        finally:
            with self._lock:
                self._line, self.up = None, False
            line.release()

    def _understand(self, head: dict[str, Any], body: bytes) -> None:
        if head.get("op") == "here":
            return
        asked = head.get("id")
        with self._lock:
            known = self._asked.pop(asked, None) if type(asked) is int else None
        if known is None:
            raise BrokenLine("an answer to nothing")
        future, understand = known
        if head.get("op") in ("failed", "cannot"):
            kind = NodeAway if head["op"] == "failed" else CannotGive
            future.set_exception(kind(str(head.get("why"))[:1000]))
            return
        try:
            answer = understand(head, body)
        except BrokenLine as err:
            future.set_exception(NodeAway(str(err)))
            raise
        future.set_result(answer)

    def _lost(self) -> None:
        with self._lock:
            lost, self._asked = list(self._asked.values()), {}
        for future, _ in lost:
            future.set_exception(NodeAway("the connection broke"))
