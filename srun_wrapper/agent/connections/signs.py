"""Signs of life: an agent gives its own, and tries to get one of another node."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from srun_wrapper.agent.loop import Loop, Timer
from srun_wrapper.protocol.base import Message
from srun_wrapper.protocol.messages import Ack
from srun_wrapper.protocol.peer_messages import Pulse, Reach, Reached

EVERY = 0.025  # s between two attempts
OPEN = 16  # attempts at a time; an older one without an answer counts as lost on its way
MOST = 5.0  # s of attempts, whatever is asked for
ANSWERS = (0, errno.ECONNREFUSED)


class Signs:
    """``send`` takes the messages to the supervisor."""

    def __init__(self, loop: Loop, send: Callable[[Message], None]) -> None:
        self._loop = loop
        self._send = send
        self._pulse = 0.0  # s between two of them
        self._next: Timer | None = None

    def takes(self, order: Message) -> bool:
        """Take an order; return True if it needs nothing else done, as for ``Reach``."""
        if isinstance(order, Ack):
            self._set(order.pulse)
        if not isinstance(order, Reach):
            return False
        _Attempts(self._loop, order, self._send).next()
        return True

    def _set(self, seconds: float) -> None:
        if seconds == self._pulse:
            return
        self._pulse = seconds
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if seconds > 0:
            self._next = self._loop.later(seconds, self._beat)

    def _beat(self) -> None:
        self._next = self._loop.later(self._pulse, self._beat)
        self._send(Pulse())


class _Attempts:
    """The attempts of one order."""

    def __init__(self, loop: Loop, order: Reach, send: Callable[[Message], None]) -> None:
        self._loop = loop
        self._order = order
        self._send = send
        self._end = time.monotonic() + min(order.seconds, MOST)
        self._open: list[socket.socket] = []
        self._tried = 0
        self._over = False

    def next(self) -> None:
        if self._over:
            return
        left = self._end - time.monotonic()
        if left <= 0:  # the loop has looked at what was answered before it came here
            self._finish("unreachable")
            return
        self._attempt()
        self._loop.later(min(EVERY, left), self.next)

    def _attempt(self) -> None:
        host, port = self._order.host, self._order.port
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError:
            return  # no file descriptor is left
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        if code != errno.EINPROGRESS:
            sock.close()
            self._tried += code in ANSWERS  # else nothing has left this host, which proves nothing
            self._answered(code)
            return
        self._tried += 1
        self._open.append(sock)
        self._loop.watch(sock, lambda _mask: self._event(sock), write=True)
        if len(self._open) > OPEN:
            self._drop(self._open[0])

    def _event(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._drop(sock)
        self._answered(code)

    def _answered(self, code: int) -> None:
        if code in ANSWERS:
            self._finish("refused" if code else "accepted")

    def _drop(self, sock: socket.socket) -> None:
        self._open.remove(sock)
        self._loop.forget(sock)
        sock.close()

    def _finish(self, answer: str) -> None:
        if self._over:
            return
        self._over = True
        for sock in list(self._open):
            self._drop(sock)
        self._send(Reached(self._order.token, answer, self._tried))
