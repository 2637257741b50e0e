"""A small event loop for the shim: sockets, timers and signals in one thread.

The shim runs once per rank and must cost next to nothing, so it does without asyncio (which
alone costs more start-up time than the rest of the shim).
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
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


class Loop:
    """Runs callbacks until ``stop`` is called."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False
        self._on_signal: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callback] = deque()
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
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, call)
        else:
            self._selector.register(sock, events, call)

    def forget(self, sock: socket.socket) -> None:
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
                self._on_signal[signum](signum)
        while self._calls:
            self._calls.popleft()()

    def call(self, call: Callback) -> None:
        """Have the loop do something soon; safe to use from another thread."""
        self._calls.append(call)
        self.wake()

    def aside(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Do ``work()``, which may take long, in a thread; ``done`` gets its result in the loop."""

        def run() -> None:
            result = work()
            self.call(lambda: done(result))

        threading.Thread(target=run, daemon=True).start()

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
            # An earlier callback of this turn may have closed it, or its number may be another's.
            now_there = self._selector.get_map().get(key.fd)
            if now_there is not None and now_there.fileobj is key.fileobj:
                now_there.data(mask)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()


def _ignore(_signum: int, _frame: object) -> None:
    """A Python-level handler must exist for the wake-up pipe to get the signal."""
