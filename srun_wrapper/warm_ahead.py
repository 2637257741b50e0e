"""Who runs the script ahead of a rank, as far as its standby_point."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

from srun_wrapper import proc
from srun_wrapper.loop import Loop
from srun_wrapper.warm_link import Said, WarmLink


class Ahead:
    """A process that has run the script as far as its standby_point and is no rank yet."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        pid: int,
        activated: Callable[[int], None],
        gone: Callable[[], None],
    ) -> None:
        self.pid = pid
        self.ready = False
        self._activated = activated
        self._gone = gone
        self.link = WarmLink(loop, sock, self._heard, gone)

    def _heard(self, said: Said) -> None:
        if said.over:
            self._gone()
        elif said.pid:
            self._activated(said.pid)
        self.ready = self.ready or bool(said.ready)

    def end(self) -> None:
        self.link.close()
        if self.pid:
            proc.send([self.pid], signal.SIGKILL)
