"""Forked ranks, and processes forked ahead of a rank: they wait, or run the script ahead."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection, Sequence

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.warm.link import Said, WarmLink


class Forked:
    """A rank that was forked: as much of ``subprocess.Popen`` as a slot uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class Ordered:
    """The stand-in that is being forked: its number, and our end of its link. At most one."""

    def __init__(self) -> None:
        self._now: tuple[int, socket.socket] | None = None
        self._ended: set[int] = set()

    def __bool__(self) -> bool:
        return self._now is not None

    def begin(self, number: int) -> socket.socket:
        """Return the stand-in's end of the link."""
        ours, theirs = socket.socketpair()
        self._now = number, ours
        self._ended.clear()
        return theirs

    def reaped(self, pids: Collection[int]) -> None:
        """Note children that have ended: one may be the stand-in, whose pid is not known yet."""
        if self._now is not None:
            self._ended.update(pids)

    def done(self, number: int, pid: int) -> socket.socket | None:
        """Return our end of the link; None: it is not wanted, and ends, or has ended already."""
        if self._now is None or self._now[0] != number:
            return None
        (_, ours), self._now = self._now, None
        if pid in self._ended:
            ours.close()
            return None
        return ours

    def cancel(self, number: int = 0) -> None:
        """Cancel a request. ``number``: default the one in hand."""
        if self._now is not None and number in (0, self._now[0]):
            self._now[1].close()
            self._now = None


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
        """True if it is on its way to the script's standby_point, or (``ready``) there."""
        self.asked = False
        """True if it is to become a rank."""
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
