"""Serves this process's lanes to the data processes of other nodes.

A connection has a thread that receives and one that sends. What is asked waits for nobody else:
a user that does not read what it has asked for holds up its own connection alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.arrays import size_of
from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange.wire import (
    MOST_REFS,
    BrokenLine,
    CannotSend,
    FrameSocket,
    pack_metas,
    pack_samples,
    whole_numbers,
)
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Ref
from robust_slurm.frames.lobby import Lobby
from robust_slurm.frames.wire import Codec

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence

    from robust_slurm.data.exchange.shelf import LaneShelf
    from robust_slurm.data.sample import Sample

BEAT = 0.5  # s between two signs of life
QUIET = 30.0  # s without a word of the other end until it is taken for dead
MOST = 4096  # connections of peers that have the key
MOST_ASKED = 1024  # answers that a connection may wait for
_GROUP = 1 << 23  # bytes of samples in an answer, or one sample


class _Answer(NamedTuple):
    asked: int
    what: str
    future: Future[Any]


class LaneServer:
    """``listener``: a socket that listens; ``plan``: peers with another one are turned away."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        plan: str,
        lanes: Collection[tuple[str, int]],
        shelf: LaneShelf,
    ) -> None:
        self._plan = plan
        self._lanes = frozenset(lanes)
        self._shelf = shelf
        self._lock = threading.Lock()
        self._open: set[FrameSocket] = set()
        self._closed = False
        # The listener is its maker's, for the process that comes after this one.
        self._lobby = Lobby(
            listener.dup(), lambda: Codec(key, server=True), self._admit, "data-exchange"
        )

    def close(self) -> None:
        """End all connections. The listener is its maker's."""
        self._lobby.close()
        with self._lock:
            self._closed = True
            for line in self._open:
                line.close()

    def _admit(self, sock: socket.socket, codec: Codec, first: bytes) -> None:
        """Give a peer that has the key a thread. Raises RuntimeError, OSError."""
        line = FrameSocket(sock, codec, silence=QUIET, first=first)
        with self._lock:
            if self._closed or len(self._open) >= MOST:
                sock.close()
                return
            self._open.add(line)
        thread = threading.Thread(target=self._serve, args=(line,), name="data-node", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._open.discard(line)
            raise

    def _serve(self, line: FrameSocket) -> None:
        user = object()
        answers: queue.Queue[_Answer | None] = queue.Queue()
        sender = threading.Thread(
            target=self._send, args=(line, answers), name="data-node-send", daemon=True
        )
        try:
            hello, _ = line.receive()
            if hello.get("op") != "hello" or hello.get("plan") != self._plan:
                return
            sender.start()
            while True:
                self._asked(line.receive()[0], user, answers)
        except (BrokenLine, RuntimeError):  # RuntimeError: no thread
            pass  # the other end goes on elsewhere, and comes again if it wants to
        finally:
            self._shelf.leave(user)
            with self._lock:
                self._open.discard(line)
            line.close()
            answers.put(None)
            if sender.ident is not None:
                sender.join()
            line.release()

    def _asked(
        self, message: dict[str, Any], user: object, answers: queue.Queue[_Answer | None]
    ) -> None:
        """Carry out one message. Raises BrokenLine for what is none of ours."""
        what = message.get("op")
        if what == "here":
            return
        source, number = message.get("source"), message.get("lane")
        if type(source) is not str or type(number) is not int:
            raise BrokenLine("no lane")
        lane = (source, number)
        if lane not in self._lanes:
            raise BrokenLine("no lane of this plan")
        if what == "passed":
            self._shelf.passed(user, lane, Position(*whole_numbers(message.get("at"), 3)))
            return
        if what == "leave":
            self._shelf.leave(user, lane)
            return
        (asked,) = whole_numbers([message.get("id")], 1)
        if answers.qsize() > MOST_ASKED:
            raise BrokenLine("too much is asked at once")
        future: Future[Any]
        if what == "next":
            after = Position(*whole_numbers(message.get("after"), 3))
            passed = Position(*whole_numbers(message.get("passed"), 3))
            (most,) = whole_numbers([message.get("most")], 1)
            future = self._shelf.next(user, lane, after, passed, max(1, min(most, MOST_REFS)))
        elif what == "take":
            refs = message.get("refs")
            if not isinstance(refs, list) or not 0 < len(refs) <= MOST_REFS:
                raise BrokenLine("no samples are asked for, or too many")
            names = [Ref(*lane, *whole_numbers(each, 3)) for each in refs]
            future = self._shelf.take(lane, names)
        else:
            raise BrokenLine("not understood")
        answer = _Answer(asked, what, future)
        future.add_done_callback(lambda _done: answers.put(answer))

    # -- the thread that sends

    def _send(self, line: FrameSocket, answers: queue.Queue[_Answer | None]) -> None:
        with contextlib.suppress(BrokenLine):
            line.send({"op": "here"})  # so the peer knows that it is admitted
            while True:
                try:
                    answer = answers.get(timeout=BEAT)
                except queue.Empty:
                    line.send({"op": "here"})
                    continue
                if answer is None:
                    return
                self._answer(line, answer)
        line.close()

    def _answer(self, line: FrameSocket, answer: _Answer) -> None:
        head: dict[str, Any] = {"id": answer.asked, "op": answer.what}
        try:
            if answer.what == "next":
                line.send(head, [pack_metas(answer.future.result())])
                return
            chosen, size = [], 0
            for sample in answer.future.result():  # the rest is asked for again
                chosen.append(sample)
                size += size_of(sample.values)
                if size > _GROUP:
                    break
            while not _sent(line, head, chosen):  # size_of() does not see values within values
                del chosen[len(chosen) // 2 :]
        except (DataError, CannotSend) as err:
            why = f"{type(err).__name__}: {err}"[:1000]
            what = "cannot" if isinstance(err, CannotSend) else "failed"
            line.send({"id": answer.asked, "op": what, "why": why})


def _sent(line: FrameSocket, head: dict[str, Any], samples: Sequence[Sample]) -> bool:
    """Send samples; False: they are too many for a message. Raises CannotSend for a single one."""
    try:
        described, body = pack_samples(samples)
        if len(samples) > 1 and sum(map(len, body)) > 2 * _GROUP:
            return False
        line.send({**head, "samples": described}, body)
    except CannotSend:
        if len(samples) > 1:
            return False
        raise
    return True
