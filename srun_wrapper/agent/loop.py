"""A small event loop for the shim: sockets, timers and signals in one thread.

The shim runs once per rank and must cost next to nothing, so it does without asyncio (which
alone costs more start-up time than the rest of the shim).
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

Callback = Callable[[], None]
T = TypeVar("T")


class Timer:
    """Handle of one scheduled call."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callback) -> None:
        self.at = at
        self.call: Callback | None = call

    def cancel(self) -> None:
        self.call = None


SPARED = 1.0  # s in which a socket is not watched: its callback failed, or accept() found no room
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("robust-task")


class Loop:
    """Runs callbacks until ``stop`` is called. An exception of a callback is reported once."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False
        self._on_signal: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callback] = deque()
        self._paused: dict[socket.socket, tuple[int, Callable[[int], None]]] = {}
        self._told: set[str] = set()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._read_wakeups)

    # -- timers

    def later(self, seconds: float, call: Callback) -> Timer:
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    # -- sockets

    def watch(self, sock: socket.socket, call: Callable[[int], None], *, write: bool) -> None:
        """Call ``call(mask)`` when the socket is readable, or writable if ``write``."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        self._paused.pop(sock, None)
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, call)
        else:
            self._selector.register(sock, events, call)

    def accept(self, sock: socket.socket) -> socket.socket | None:
        """Accept the next connection; None if there is none, or no room: then pause the socket."""
        try:
            return sock.accept()[0]
        except OSError as err:  # mostly: no connection waits any more
            if err.errno in _NO_ROOM:
                self._pause(sock)
            return None

    def _pause(self, sock: socket.socket) -> None:
        """Pause a socket that stays readable and would keep the loop busy."""
        key = self._selector.get_map().get(sock.fileno())
        if key is None or key.fileobj is not sock:
            return
        self._paused[sock] = (key.events, key.data)
        self._selector.unregister(sock)
        self.later(SPARED, lambda: self._go_on(sock))

    def _go_on(self, sock: socket.socket) -> None:
        events, call = self._paused.pop(sock, (0, None))
        if call is not None:
            self._selector.register(sock, events, call)

    def forget(self, sock: socket.socket) -> None:
        self._paused.pop(sock, None)
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)

    # -- signals

    def on_signals(self, signals: Iterable[int], call: Callable[[int], None]) -> None:
        """Handle signals in the loop instead of dying of them."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in signals:
            self._on_signal[signum] = call
            signal.signal(signum, _ignore)

    def _read_wakeups(self, _mask: int) -> None:
        try:
            received = os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        for signum in dict.fromkeys(received):
            if signum in self._on_signal:
                self._try(partial(self._on_signal[signum], signum))
        while self._calls:
            self._try(self._calls.popleft())

    def call(self, call: Callback) -> None:
        """Have the loop do something soon; safe to use from another thread."""
        self._calls.append(call)
        self.wake()

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None], otherwise: T) -> None:
        """Do ``work()``, which may take long, in a thread; ``done`` gets its result in the loop.

        ``otherwise``: the result of work that raises, or gets no thread; that is reported once.
        """

        def run() -> None:
            result = otherwise

            def keep() -> None:
                nonlocal result
                result = work()

            self._try(keep)
            self.call(lambda: done(result))

        if not self._try(threading.Thread(target=run, daemon=True).start):
            self.call(lambda: done(otherwise))

    def wake(self) -> None:
        """Make the loop turn once; safe to call from another thread."""
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # it is going to turn anyway

    # -- running

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        self._running = True
        while self._running:
            self.turn(None)

    def turn(self, limit: float | None) -> None:
        """Wait for the next thing to do (at most ``limit`` seconds) and do it."""
        wait = limit
        if self._timers:
            due = max(0.0, self._timers[0][0] - time.monotonic())
            wait = due if wait is None else min(due, wait)
        for key, mask in self._selector.select(wait):
            # An earlier callback of this turn may have closed it, or given its number to another.
            now_there = self._selector.get_map().get(key.fd)
            if now_there is not None and now_there.fileobj is key.fileobj:
                well = self._try(partial(now_there.data, mask))
                if not well and isinstance(key.fileobj, socket.socket):
                    self._pause(key.fileobj)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._try(timer.call)

    def _try(self, call: Callback) -> bool:
        """Call it; False if it raised. One error of ours must not cost the node its ranks."""
        try:
            call()
        except Exception as error:  # noqa: BLE001
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = f"{place.tb_frame.f_code.co_name}:{place.tb_lineno}" if place else "?"
            text = f"{type(error).__name__} in {where}: {error}"
            if text not in self._told:
                self._told.add(text)
                _log.error(f"internal error, continuing: {text}")
            return False
        return True


def _ignore(_signum: int, _frame: object) -> None:
    """A Python-level handler must exist for the wake-up pipe to get the signal."""
