"""The socket on which the supervisor and other agents ask a node whether it is alive."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from srun_wrapper.agent.connections.guests import Guests
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import PeerAsk, PeerSay, decode_ask

OPEN = 5.0  # s that a connection may stay open


class Probe:
    """Listens on ``port``. ``answer`` returns the reply to a question, or None for no reply."""

    def __init__(
        self, loop: Loop, key: bytes, server: str, answer: Callable[[PeerAsk], PeerSay | None]
    ) -> None:
        """``server``: the supervisor's address, of the family that is listened on."""
        self._loop = loop
        self._key = key
        self._answer = answer
        self._guests = Guests(loop)
        self._sock = socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET)
        self._sock.bind(("", 0))
        self._sock.listen(64)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        loop.watch(self._sock, lambda _mask: self._accept(), write=False)

    def _accept(self) -> None:
        peer = self._loop.accept(self._sock)
        if peer is None:
            return
        link = Link(
            self._loop,
            peer,
            self._key,
            server=True,
            on_payload=self._heard,
            on_close=lambda _link, _reason: None,
        )
        self._guests.admit(link)
        self._loop.later(OPEN, link.close)

    def _heard(self, link: Link, payload: bytes) -> None:
        try:
            ask: PeerAsk = decode_ask(payload)
        except msgspec.MsgspecError:
            link.close("not a question")
            return
        reply = self._answer(ask)
        if reply is not None:
            link.send(reply)

    def close(self) -> None:
        self._loop.forget(self._sock)
        self._sock.close()
