"""A rank's line to robust-task, on which it is told to leave its collective, and later to go on.

The rank listens on a socket beside its heartbeat's record. robust-task connects and sends PAUSE;
the rank leaves what it does and answers READY; robust-task sends one line of JSON, the environment
of the next epoch, and the rank answers GOING. A rank that does not answer in time is ended and
replaced, as without this file.
"""

from __future__ import annotations

import ctypes
import json
import threading

from robust_slurm.auto.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

PAUSE = b"p"
READY = b"r"
GOING = b"g"
SUFFIX = ".rejoin"  # of the socket beside a record of the heartbeat (``layout.beside``)
MOST = 1 << 20  # bytes of an environment
ASKED = 1.0  # s for a peer that has connected to send its request
SOON = 0.05  # s for an aborted collective to raise by itself, before Interrupted is raised
AGAIN = 0.25  # s between two further attempts to interrupt the training's thread


class Interrupted(BaseException):
    """Raised in the training's thread, wherever it is, to bring it back to ``resilient``."""


class RejoinOffer:
    """One round of the function: from its start to its end, or to the order to rejoin."""

    def __init__(
        self, path: str, leave: Callable[[], None], silently: Callable[[], bool] = bool
    ) -> None:
        """Listen; called in the training's thread. ``leave``: gets that thread out of a collective;
        it may be called again. ``silently``: returns True if an aborted collective may look as if
        it had succeeded. Raises OSError."""
        self._leave = leave
        self._silently = silently
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._out = threading.Event()
        self._done = threading.Event()  # the helper's thread
        self._over = False
        self._line: socket.socket | None = None
        self._robust_task: socket.socket | None = None
        self.ordered = threading.Event()
        """robust-task has asked this rank to rejoin."""
        listen(path, 1, self._wait)

    # -- in the training's thread

    def end(self) -> bool:
        """End the round. True if the rank is to rejoin; else no order is accepted any more."""
        while True:
            try:
                with self._lock:
                    self._over = True
                    self._out.set()
                if self._line is not None:
                    self._shut(self._line)
                _call_off(self._thread)
                if self.ordered.is_set():
                    self._done.wait()
                return self.ordered.is_set()
            except Interrupted:
                continue

    def ready(self) -> None:
        """Tell robust-task that this rank waits. Raises OSError."""
        if self._robust_task is not None:
            self._robust_task.settimeout(None)  # a replacement node may take long to start
            self._robust_task.sendall(READY)

    def wait(self) -> Mapping[str, Any] | None:
        """Wait for the next epoch's environment; None if robust-task ends this rank, or is gone."""
        line, raw = self._robust_task, b""
        if line is None:
            return None
        try:
            while not raw.endswith(b"\n"):
                part = line.recv(1 << 16)
                raw += part
                if not part or len(raw) > MOST:
                    return None
            found = json.loads(raw)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def going(self) -> None:
        """Tell robust-task that this rank is of the next epoch. Raises OSError."""
        if self._robust_task is not None:
            self._robust_task.sendall(GOING)
            self._robust_task.close()

    # -- in the helper's thread

    def _wait(self, line: socket.socket) -> None:
        with self._lock:
            self._line = line
            if self._over:
                self._shut(line)
        try:
            while not self._asked(line):
                pass
        except OSError:  # the round is over
            return
        finally:
            line.close()
        wait = SOON
        self._leave_now()
        while not self._out.wait(wait):
            self._leave_now()
            self._interrupt()
            wait = AGAIN
        self._done.set()

    def _interrupt(self) -> None:
        with self._lock:  # nothing may be raised in the thread once it has left the function
            if not self._out.is_set():
                _raise_in(self._thread)

    def _asked(self, line: socket.socket) -> bool:
        asker, _ = line.accept()
        asker.settimeout(ASKED)
        try:
            asked = asker.recv(1) == PAUSE
        except OSError:
            asked = False
        with self._lock:
            if asked and not self._over:
                self._robust_task = asker
                self.ordered.set()
                return True
        asker.close()
        return False

    def _leave_now(self) -> None:
        try:
            if self._silently():  # before the program can compute with, or save, a wrong result
                self._interrupt()
            self._leave()
        except Exception:  # noqa: BLE001 - then the rank does not answer, and is replaced
            pass

    @staticmethod
    def _shut(line: socket.socket) -> None:
        import socket

        try:
            line.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass


def _raise_in(thread: int) -> None:
    raised = ctypes.py_object(Interrupted)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _call_off(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
