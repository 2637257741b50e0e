"""The shim's end of its connection to a warm interpreter: requests out, lines in."""

from __future__ import annotations

import array
import socket
from collections.abc import Callable, Collection

import msgspec

from srun_wrapper.agent.loop import Loop

ANSWER = 2.0  # s that a request may take


class Said(msgspec.Struct):
    """One line from the other end."""

    ready: int = 0
    arguments: int = 0
    """Number of the script's arguments, at the end of the command line."""
    pid: int = 0
    stand_in: int = 0
    """A number other than 0: the process was asked for under this number."""
    over: str = ""


class WarmLink:
    """``heard`` gets each line; ``gone`` is called when the other end is gone or makes no sense."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        heard: Callable[[Said], None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._heard = heard
        self._gone = gone
        self._rest = b""
        self._closed = False
        loop.watch(sock, self._readable, write=False)

    def send(self, message: object, fds: Collection[int] = ()) -> None:
        """Send a message. Raises OSError, also when it is not taken in time."""
        body = msgspec.json.encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._sock.settimeout(ANSWER)
        self._sock.sendmsg([len(body).to_bytes(8, "big")], rights)
        self._sock.sendall(body)

    def _readable(self, _mask: int) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except (TimeoutError, InterruptedError):
            return
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = msgspec.json.decode(line, type=Said)
            except (ValueError, RecursionError):  # no UTF-8, or nested too deep
                data = b""
                break
            if not self._closed:
                self._heard(said)
        if not data and not self._closed:
            self._gone()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.forget(self._sock)
            self._sock.close()
