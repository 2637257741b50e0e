"""The connections of a node's other shims to its agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from srun_wrapper.agent.connections.guests import MOST, GuestLimits, Guests
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.place import Place, shims_socket
from srun_wrapper.protocol.messages import Message, SlotHello, SlotWelcome, decode_from_shim

SHIM_HANDSHAKE = 30.0  # s; all shims of a node start at once
REBORN = 10.0  # s for a shim that died to be back


class Shims:
    """Accepts the shims, and keeps what they are: ``links``, ``tasks``, ``pids`` by local id.

    The agent's own shim is among the tasks and pids.
    """

    def __init__(
        self,
        loop: Loop,
        place: Place,
        key: bytes,
        run_dir: Path,
        *,
        joined: Callable[[int], None],
        heard: Callable[[int, Message], None],
        died: Callable[[int], None],
        lost: Callable[[int], None],
    ) -> None:
        """``lost``: a shim that ``died`` was not started again by its guardian."""
        self._loop = loop
        self._run_dir = run_dir
        self._joined = joined
        self._heard = heard
        self._died = died
        self._lost = lost
        self.links: dict[int, Link] = {}
        self.tasks: dict[int, int] = {place.local: place.task}
        self.pids: dict[int, int] = {place.local: os.getpid()}
        self.absent: set[int] = set()
        """Slots whose shims have died and are not back."""
        self._slot_of: dict[Link, int] = {}
        self._over = False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = shims_socket(run_dir, place)
        Path(address).unlink(missing_ok=True)
        sock.bind(address)
        sock.listen(1024)
        limits = GuestLimits(MOST + place.local_tasks, SHIM_HANDSHAKE)
        self._guests = Guests(loop, sock, key, self._received, self._closed, limits)

    def _received(self, link: Link, payload: bytes) -> None:
        try:
            message = decode_from_shim(payload)
        except msgspec.MsgspecError:
            link.close("message not understood")
            return
        if isinstance(message, SlotHello):
            self.links[message.local] = link
            self.tasks[message.local] = message.task
            self.pids[message.local] = message.pid
            self._slot_of[link] = message.local
            link.send(SlotWelcome(str(self._run_dir)))
            self.absent.discard(message.local)
            self._joined(message.local)
        else:
            self._heard(self._slot_of.get(link, -1), message)

    def _closed(self, link: Link, _reason: str) -> None:
        local = self._slot_of.pop(link, -1)
        if local >= 0 and self.links.get(local) is link and not self._over:
            del self.links[local]
            self.absent.add(local)
            self._died(local)
            self._loop.later(REBORN, lambda: self._give_up(local))

    def _give_up(self, local: int) -> None:
        if local in self.absent and not self._over:
            self.absent.discard(local)
            self._lost(local)

    def send(self, message: Message) -> None:
        """Send a message to all of them."""
        for link in self.links.values():
            link.send(message)

    def over(self) -> None:
        """The step is over: a shim that leaves now has not died."""
        self._over = True

    def close(self) -> None:
        """Close all connections; pending messages have been sent."""
        self._over = True
        for link in self.links.values():
            link.close()
        self._guests.close()
