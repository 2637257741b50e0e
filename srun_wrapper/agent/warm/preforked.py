"""A process forked before a rank is wanted; it waits at once, or runs the script ahead first."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.warm.link import Said, WarmLink


class Ahead:
    """A process that is no rank yet: a stand-in, until it is told to ``run``."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        pid: int,
        activated: Callable[[int], None],
        gone: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        """``gone``: its end is closed; ``over``: it says that it cannot be a rank any more."""
        self.pid = pid
        self.ready = True
        self.further = False
        """It is on its way to the script's standby_point, or (``ready``) there."""
        self.asked = False
        """To become a rank."""
        self._activated = activated
        self._gone = gone
        self._over = over
        self.link = WarmLink(loop, sock, self._heard, gone)

    def run(self, request: dict[str, object]) -> None:
        """Have it run the script as far as its standby_point."""
        self.further, self.ready = True, False
        try:
            self.link.send({**request, "ahead": 1})
        except OSError:
            self._gone()

    def fits(self, command: Sequence[str], started: Sequence[str]) -> bool:
        """True if it can become this command. The script's arguments may differ from those that its
        interpreter was ``started`` with only while the script cannot have seen them."""
        return not self.further or (self.ready and list(command) == list(started))

    def _heard(self, said: Said) -> None:
        if said.over:
            self._over()
        elif said.pid:
            self._activated(said.pid)
        self.ready = self.ready or bool(said.ready)

    def end(self) -> None:
        self.link.close()
        if self.pid:
            process_tree.send([self.pid], signal.SIGKILL)
