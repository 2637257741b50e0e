"""Accepts the connections of a listener in one thread, and admits those that prove the key.

For servers that give each peer a thread of its own: a peer gets it only after the proof.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from robust_slurm.frames.admission import MOST, SECONDS, Admission
from robust_slurm.frames.wire import Codec, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.05  # s after an error that may well recur: a limit of the user, the job or the node


class Lobby:
    """``admitted(socket, codec, payload)`` gets each peer that has the key, with the first payload
    that it has sent; nothing after that has been read. It is called in the lobby's thread and must
    not wait; if it raises OSError or RuntimeError (no thread), the connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        admitted: Callable[[socket.socket, Codec, bytes], None],
        name: str,
        most: int = MOST,
        seconds: float = SECONDS,
    ) -> None:
        """``listener`` is closed with the lobby. ``name``: of the thread."""
        self._listener = listener
        self._key = key
        self._admitted = admitted
        self._selector = selectors.DefaultSelector()
        self._admission: Admission[socket.socket] = Admission(self._drop, most, seconds)
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
                    sock = ready.fileobj
                    if sock is self._listener:
                        self._accept()
                    elif isinstance(ready.data, Codec) and isinstance(sock, socket.socket):
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
            codec = Codec(self._key, server=True)
            sock.send(codec.preface())
            self._selector.register(sock, selectors.EVENT_READ, codec)
        except OSError:
            sock.close()
            return
        self._admission.enter(sock)

    def _read(self, sock: socket.socket, codec: Codec) -> None:
        if sock.fileno() < 0:  # ended earlier in this turn
            return
        try:
            data = sock.recv(codec.wanted)
            payloads = codec.feed(data) if data else None
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
            self._admitted(sock, codec, payloads[0])
        except (OSError, RuntimeError):
            sock.close()
            time.sleep(_PAUSE)

    def _drop(self, sock: socket.socket, _why: str = "") -> None:
        self._selector.unregister(sock)
        sock.close()
