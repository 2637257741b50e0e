"""One authenticated connection of the shim's loop: a socket with the wire codec around it."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

from robust_slurm.frames.wire import Codec, WireError
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import Message, encode

MAX_BACKLOG = 8 << 20  # bytes not yet taken by the peer before it is given up


class Link:
    """Sends messages, hands received payloads to ``on_payload``; ``on_close(reason)`` once.

    The socket may still be connecting (non-blocking connect).
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        key: bytes,
        *,
        server: bool,
        on_payload: Callable[[Link, bytes], None],
        on_close: Callable[[Link, str], None],
        on_ready: Callable[[Link], None] | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._codec = Codec(key, server=server)
        self._out = bytearray(self._codec.preface())
        self._waiting: list[bytes] = []
        self._undelivered: deque[bytes] = deque()
        self._on_payload = on_payload
        self._on_close = on_close
        self._on_ready = on_ready
        self.closed = False
        self._peer_gone = False
        self.connected = server
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock, self._event, write=True)

    @property
    def ready(self) -> bool:
        """True once the peer has introduced itself."""
        return self._codec.ready and not self.closed

    @property
    def ready_once(self) -> bool:
        """True if the peer ever introduced itself on this connection."""
        return self._codec.ready

    @property
    def authenticated(self) -> bool:
        """True if the peer has proved that it has the key: anybody can introduce himself."""
        return self._codec.trusted

    def send(self, message: Message) -> None:
        self.send_payload(encode(message))

    def send_payload(self, payload: bytes) -> None:
        if self.closed or self._peer_gone:
            return
        if not self._codec.ready:
            self._waiting.append(payload)
            return
        self._out += self._codec.seal(payload)
        if len(self._out) > MAX_BACKLOG:
            self.close("peer does not read its messages")
            return
        self._write()

    def close(self, reason: str = "closed") -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.forget(self._sock)
        self._sock.close()
        self._on_close(self, reason)

    def _event(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            self._read()

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out)
                self.connected = True
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except (BrokenPipeError, ConnectionResetError) as err:
            if not self.connected:
                self.close(err.strerror or str(err))
                return
            # The peer is gone, but its last words (Finish) may be here: read to the end.
            self._peer_gone = True
            self._out.clear()
        except OSError as err:
            self.close(err.strerror or str(err))
            return
        self._loop.watch(self._sock, self._event, write=bool(self._out))

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as err:
            self.close(err.strerror or str(err))
            return
        if not data:
            self.close("closed by peer")
            return
        was_ready = self._codec.ready
        try:
            self._undelivered += self._codec.feed(data)
        except WireError as err:
            self.close(str(err))
            return
        if self._codec.ready and not was_ready:
            if not self._peer_gone:
                for payload in self._waiting:
                    self._out += self._codec.seal(payload)
                self._waiting.clear()
                self._write()
            if self._on_ready is not None and not self.closed:
                self._on_ready(self)
        self._deliver()

    def _deliver(self) -> None:
        """Hand the payloads over; one that makes ``on_payload`` raise costs none of the others."""
        while self._undelivered and not self.closed:
            payload = self._undelivered.popleft()
            try:
                self._on_payload(self, payload)
            except Exception:
                self._loop.call(self._deliver)
                raise
