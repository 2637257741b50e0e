"""The node's one connection to the supervisor: made, watched, and made again when it breaks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.connections.silence import SLEPT, Contact, SilenceVerdict, judge_silence
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import Message

RETRY = 0.25
CONNECT_TIMEOUT = 1.0
BUSY_TIMEOUT = 15.0  # s for a host that has taken the connection to say something
QUIET = 1.5  # s without an answer to our reports before the connection is made anew


class Uplink:
    """``introduce(link)`` sends what comes first on each connection; ``take`` gets what comes."""

    def __init__(
        self,
        loop: Loop,
        server: str,
        port: int,
        key: bytes,
        introduce: Callable[[Link], None],
        take: Callable[[Link, bytes], None],
    ) -> None:
        self.server = server
        self.contact = Contact(since=time.monotonic())
        self._loop = loop
        self._port = port
        self._key = key
        self._introduce = introduce
        self._take = take
        self._link: Link | None = None
        self._introduced = self._begun = 0.0
        self._over = False
        self._judged = time.monotonic()

    def connect(self) -> None:
        """Connect, unless there is a connection or an attempt, or none is needed any more."""
        if self._over or self._link is not None:
            return
        family = socket.AF_INET6 if ":" in self.server else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._begun = time.monotonic()
        try:
            sock.connect((self.server, self._port))
        except BlockingIOError:
            pass
        except OSError as err:
            # Over loopback a refusal is known at once, and so is a network that is down.
            sock.close()
            refused = isinstance(err, ConnectionRefusedError)
            self.contact.lost(time.monotonic(), refused=refused, accepted=False, begun=self._begun)
            self._loop.later(RETRY, self.connect)
            return
        link = Link(
            self._loop,
            sock,
            self._key,
            server=False,
            on_payload=self._heard,
            on_close=self._gone,
            on_ready=self._ready,
        )
        self._link = link
        self._loop.later(CONNECT_TIMEOUT, lambda: self._give_up(link, last=False))

    def send(self, message: Message) -> None:
        """Send a message; it is dropped while there is no connection."""
        if self._link is not None and self._link.ready:
            self._link.send(message)

    def over(self) -> None:
        """Make no new connection when this one breaks: nothing is left to send."""
        self._over = True

    def close(self) -> None:
        self.over()
        if self._link is not None:
            self._link.close()

    def judge(self, interval: float, lost_host: float, mute: float, first: float) -> SilenceVerdict:
        """Judge the supervisor's silence; called about every ``interval`` seconds."""
        # A connection made anew gets its time too: a stumble of the supervisor must not end in
        # every agent cutting the line again before its answer is there.
        now = time.monotonic()
        asleep, self._judged = now - self._judged, now
        if asleep > SLEPT + interval:
            self.contact.slept(now)
        silent = now - max(self.contact.since, self._introduced)
        if silent > max(QUIET, 2.2 * interval) and self._link and self._link.ready:
            self._link.close("silent")  # the new attempt shows whether the host is there
        return judge_silence(self.contact, now, lost_host, mute, first)

    # -- inside

    def _give_up(self, link: Link, *, last: bool) -> None:
        """End an attempt to connect that took too long."""
        if link.ready or link.closed:
            return
        if link.connected and not last:
            # The host's kernel has accepted the connection. More attempts would only fill its
            # queue, until a busy host looks like a dead one.
            self._loop.later(BUSY_TIMEOUT, lambda: self._give_up(link, last=True))
            return
        link.close("timed out")

    def _ready(self, link: Link) -> None:
        self.contact.refused_since = None
        self._introduced = time.monotonic()
        self._introduce(link)

    def _heard(self, link: Link, payload: bytes) -> None:
        self.contact.heard(time.monotonic())
        self._take(link, payload)

    def _gone(self, link: Link, reason: str) -> None:
        if self._link is link:
            self._link = None
            now = time.monotonic()
            if link.ready_once and not self._over:
                # A live connection broke: make it again, at once if it is the first time.
                recent = now - self._introduced < RETRY
                self._loop.later(RETRY if recent else 0.0, self.connect)
                return
            refused = "refused" in reason
            self.contact.lost(now, refused=refused, accepted=link.connected, begun=self._begun)
            self._loop.later(RETRY, self.connect)
