"""A rank's stdin, which its next incarnation must find as the first one did.

srun gives each task a pipe (or, with ``--input=FILE``, the file itself), which every process of the
slot inherits. The shim puts a pipe of its own in that place, keeps what it passes on, and passes
it on again when a rank is restarted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import stat
import struct
import termios
import threading
from collections.abc import Callable

from srun_wrapper.protocol.task_options import STDIN_KEPT

_CHUNK = 1 << 16
_log = logging.getLogger("robust-task")


class Stdin:
    """Takes over descriptor ``fd`` of this process; the loop never waits for it.

    ``tell(whole)`` is called in another thread when input has come, and again when it is not
    ``whole`` any more: the rank has read more than is kept.
    """

    def __init__(self, tell: Callable[[bool], None], fd: int = 0, limit: int = STDIN_KEPT) -> None:
        self._tell = tell
        self._fd = fd
        self._limit = limit
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._dropped = 0  # bytes that came before what is kept
        self._fed = 0  # bytes that the pipe has taken in this incarnation
        self._ended = False  # srun has no more
        self._file = False
        self._sink = -1
        self._feeding = False
        self._done = False
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                self._file = True
                self.rewind()  # a shim before this one may have had it
                tell(True)
            elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                self._take_over()
        except OSError:
            pass  # closed: there is no input

    def _take_over(self) -> None:
        self._source = os.dup(self._fd)
        os.set_blocking(self._source, False)
        reading, self._sink = os.pipe()
        os.set_blocking(self._sink, False)
        os.dup2(reading, self._fd)
        os.close(reading)
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        self._feeding = True
        threading.Thread(target=self._feed, daemon=True).start()

    def finish(self) -> None:
        """Discard the rest of the input: the rank ended well, so no other task must wait for it."""
        if self._feeding:
            self._done = True
            os.write(self._woken, b"x")

    def used(self) -> bool:
        """True if a rank may have read some input, which only a new process would find again."""
        try:
            return os.lseek(self._fd, 0, os.SEEK_CUR) > 0 if self._file else self._fed > 0
        except OSError:
            return True

    def rewind(self) -> None:
        """Have the next rank find all its input again; no process may be reading it."""
        with contextlib.suppress(OSError):
            if self._file:
                os.lseek(self._fd, 0, os.SEEK_SET)
            if not self._feeding:
                return
            with self._lock:
                if not self._fed or self._dropped:
                    return
                while unread := _unread(self._fd):
                    os.read(self._fd, unread)
                if self._sink < 0:  # the last rank was to see the end of its input
                    self._sink = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC)
                    os.set_blocking(self._sink, False)
                self._fed = 0
                self._done = False
            os.write(self._woken, b"x")

    # -- in the thread

    def _feed(self) -> None:
        try:
            while True:
                waits = select.poll()
                waits.register(self._wake, select.POLLIN)
                for fd, event in self._step():
                    waits.register(fd, event)
                if self._ended and not self._kept:
                    return  # there never was any
                if any(fd == self._wake for fd, _ in waits.poll()):
                    os.read(self._wake, _CHUNK)
        except (OSError, ValueError) as error:
            _log.warning(f"cannot pass stdin on to the rank: {error}")
        finally:
            self._feeding = False

    def _step(self) -> list[tuple[int, int]]:
        """Move what can be moved. Returns what to wait for then: descriptors and events."""
        with self._lock:
            told = self._take()
            waiting = self._give()
            if self._ended and not waiting and self._sink >= 0:
                os.close(self._sink)
                self._sink = -1
            full = self._full()
        if told is not None:
            self._tell(told)
        waits = [(self._sink, select.POLLOUT)] if waiting else []
        return waits if self._ended or full else [*waits, (self._source, select.POLLIN)]

    def _full(self) -> bool:
        """True if no more is read from srun until the rank has read what it was given."""
        return self._room() <= 0

    def _room(self) -> int:
        """Return the bytes to read next; while the rank has some unread, only what can be kept."""
        waiting = self._fed < self._dropped + len(self._kept) and not self._done
        return min(_CHUNK, self._limit - len(self._kept)) if waiting else _CHUNK

    def _take(self) -> bool | None:
        """Read from srun; return the argument for ``tell``, None if there is no news."""
        if self._ended or self._full():
            return None
        first, whole = not (self._kept or self._dropped), not self._dropped
        try:
            data = os.read(self._source, self._room())
        except BlockingIOError:
            return None
        except OSError:
            data = b""  # srun is gone
        self._ended = not data
        self._kept += data
        surplus = len(self._kept) - self._limit
        if surplus > 0:
            del self._kept[:surplus]
            self._dropped += surplus
            self._fed = max(self._fed, self._dropped)
        if whole and self._dropped:
            return False
        return True if first and data else None

    def _give(self) -> bool:
        """Write into the rank's pipe; return True if the pipe did not take everything."""
        while (start := self._fed - self._dropped) < len(self._kept):
            try:
                self._fed += os.write(self._sink, self._kept[start : start + _CHUNK])
            except BlockingIOError:
                return True
        return False


def _unread(fd: int) -> int:
    """Bytes that lie in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return count
