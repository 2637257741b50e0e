"""Pings a data process every few seconds, to find one that is stopped or deadlocked."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from robust_slurm import process_stat
from robust_slurm.frames.json_lines import encode
from srun_wrapper.agent.loop import Loop, Timer

EVERY = 3.0  # s
MOST = 5  # times without an answer or any sign of work: ranks wait 30 s
_PING = encode({"op": "ping"})
_AT_WORK = frozenset("RDt")  # states of a thread that has work, waits for a disk, or is debugged


class Pings:
    """``path``: of its socket; ``pid`` returns 0 while it does not run; ``dead`` is called after
    ``MOST`` pings without an answer or a sign of work, and again after as many more. In the
    loop's thread.

    Turns are counted, not seconds: none passes while robust-task itself is stopped or gets no CPU
    time. A process that has never answered is still starting, and is not called dead.
    """

    def __init__(
        self, loop: Loop, path: Path, pid: Callable[[], int], dead: Callable[[], None]
    ) -> None:
        self._loop, self._path, self._pid, self._dead = loop, path, pid, dead
        self.answered = False
        """True once the process that runs now has answered."""
        self._sock: socket.socket | None = None
        self._silent = 0
        self._ticks = -1
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Begin to ping a process that has just been started."""
        self.end()
        self.answered, self._silent = False, 0
        self._timer = self._loop.later(EVERY, self._turn)

    def end(self) -> None:
        """End the pings: the process has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hang_up()

    def _turn(self) -> None:
        self._timer = self._loop.later(EVERY, self._turn)
        if self._silent and self._at_work():
            self._silent = 1
        if self.answered and self._silent >= MOST:
            self._silent = 0
            self._dead()
            return
        self._silent += 1
        try:
            if self._sock is None:
                self._sock = socket.socket(
                    socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                )
                self._sock.connect(str(self._path))
                self._loop.watch(self._sock, lambda _mask: self._hear(), write=False)
            self._sock.send(_PING)
        except BlockingIOError:
            pass  # its queue is full
        except OSError:
            self._hang_up()

    def _hear(self) -> None:
        got = b""
        with contextlib.suppress(OSError):
            assert self._sock is not None
            got = self._sock.recv(1 << 12)
        if got:
            self.answered, self._silent = True, 0
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.forget(sock)
            sock.close()

    def _at_work(self) -> bool:
        """Return whether it has used CPU time since the last turn, or wants to."""
        before, found = self._ticks, _look(self._pid())
        self._ticks = found[0]
        return found[0] != before or not _AT_WORK.isdisjoint(found[1])


def _look(pid: int) -> tuple[int, set[str]]:
    """Return a process's CPU time so far, and the states of its threads."""
    states: set[str] = set()
    ticks = 0
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            states.add(process_stat.read(thread.name, str(thread.parent)).state)
        ticks = process_stat.read(pid).ticks
    return ticks, states
