"""Accepts the connections of a listener in one thread, and admits those that prove what they are.

For servers that give each peer a thread of its own: a peer gets it only after the proof, which is
mostly a frame that only holders of the key can make.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from robust_slurm.frames.admission import MOST, SECONDS, Strangers
from robust_slurm.frames.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.05  # s after an error that may well recur: a limit of the user, the job or the node


class PeerProof(Protocol):
    """Collects what a new connection has sent so far, as ``Codec`` does."""

    @property
    def wanted(self) -> int:
        """Number of bytes to read now."""

    def preface(self) -> bytes:
        """Return what the peer is sent first."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return [] until the proof is whole. Raises WireError."""


P = TypeVar("P", bound=PeerProof)


class Lobby(Generic[P]):
    """``admitted(socket, proof, payload)`` gets each peer that has proved itself, with the payload
    that did it; nothing after that has been read. It is called in the lobby's thread and must not
    wait; if it raises OSError or RuntimeError (no thread), the connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        begin: Callable[[], P],
        admitted: Callable[[socket.socket, P, bytes], None],
        name: str,
        most: int = MOST,
        seconds: float = SECONDS,
    ) -> None:
        """``listener`` is closed with the lobby. ``begin`` makes the proof of a new connection.
        ``name``: of the thread."""
        self._listener = listener
        self._begin = begin
        self._admitted = admitted
        self._selector = selectors.DefaultSelector()
        self._admission: Strangers[socket.socket] = Strangers(self._drop, most, seconds)
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> threading.Thread:
        """Accept no more. Returns the thread, which ends at once."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        return self._thread

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                # One accepted connection a turn: those that wait to be heard are not held up.
                for ready, _ in self._selector.select(1.0 if len(self._admission) else None):
                    sock: Any = ready.fileobj
                    if sock is self._listener:
                        self._accept()
                    elif ready.data is not None:
                        self._read(sock, ready.data)
                self._admission.sweep()
        finally:
            while self._admission.evict():
                pass
            self._selector.close()
            for each in (self._listener, self._wake, self._woken):
                each.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as err:
            if err.errno in _NO_ROOM and not self._admission.evict():
                time.sleep(_PAUSE)
            return
        try:
            sock.setblocking(False)
            proof = self._begin()
            if preface := proof.preface():
                sock.send(preface)
            self._selector.register(sock, selectors.EVENT_READ, proof)
        except OSError:
            sock.close()
            return
        self._admission.enter(sock)

    def _read(self, sock: socket.socket, proof: P) -> None:
        if sock.fileno() < 0:  # ended earlier in this turn
            return
        try:
            data = sock.recv(proof.wanted)
            payloads = proof.feed(data) if data else None
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, WireError):
            payloads = None
        if payloads == []:
            return
        self._admission.leave(sock)
        if payloads is None:
            self._drop(sock)
            return
        self._selector.unregister(sock)
        try:
            self._admitted(sock, proof, payloads[0])
        except (OSError, RuntimeError):
            sock.close()
            time.sleep(_PAUSE)

    def _drop(self, sock: socket.socket, _why: str = "") -> None:
        self._selector.unregister(sock)
        sock.close()
