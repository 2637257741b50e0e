"""The socket on which the supervisor and other agents ask a node whether it is alive."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from srun_wrapper.agent.connections.guests import GuestLimits, Guests
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import PeerAsk, PeerSay, decode_ask

OPEN = 5.0  # s that a connection may stay open
QUEUE = 1024
"""Connections that the kernel accepts (or 128, before Linux 5.4) for a process that is stopped: the
next one gets no answer, as from a host that is gone. It is asked 100 times in ten minutes."""


class Probe:
    """Listens on ``port``. ``answer`` returns the reply to a question, or None for no reply."""

    def __init__(
        self, loop: Loop, key: bytes, server: str, answer: Callable[[PeerAsk], PeerSay | None]
    ) -> None:
        """``server``: the supervisor's address, of the family that is listened on."""
        self._answer = answer
        sock = socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET)
        sock.bind(("", 0))
        sock.listen(QUEUE)
        self.port: int = sock.getsockname()[1]
        self._guests = Guests(loop, sock, key, self._heard, limits=GuestLimits(stay=OPEN))

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
        self._guests.close()
