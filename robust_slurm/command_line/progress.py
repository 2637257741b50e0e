"""A progress bar on stderr, for people at a terminal who wait for longer than two seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO

AFTER_S = 2.0
_EVERY_S = 0.25
_WIDTH = 24  # of the bar
_CLEAR = "\r\x1b[K"


class ProgressBar:
    """Shows how much of ``total`` is done, while the ``with`` block runs.

    ``total`` 0: only the time. ``add`` may be called by any thread. A terminal that cannot move
    its cursor (TERM=dumb), a file and a pipe get nothing.
    """

    _shown: ProgressBar | None = None  # the one that has a line on the terminal
    _lock = threading.RLock()

    def __init__(
        self, what: str, total: float, unit: str = "", *, by_time: bool = False,
        stream: IO[str] | None = None, after: float = AFTER_S,
    ) -> None:  # fmt: skip
        self._what, self._total, self._unit, self._by_time = what, total, unit, by_time
        self._stream = sys.stderr if stream is None else stream
        self._after = after
        self._done = 0.0
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressBar:
        if _can_move(self._stream):
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def add(self, amount: float) -> None:
        """Count so much more as done."""
        with self._lock:
            self._done += amount

    def text(self) -> str:
        """Return the line as it would be drawn now."""
        passed = time.monotonic() - self._began
        done = passed if self._by_time else self._done
        share = min(1.0, done / self._total) if self._total else 0.0
        filled = round(share * _WIDTH)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        so_far = _amount(done, self._unit if self._unit == "B" else "")
        amount = f"{so_far} of {_amount(self._total, self._unit)}"
        if self._by_time:
            return f"{self._what} [{bar}] {passed:.0f} s of at most {self._total:.0f} s"
        if not self._total:
            return f"{self._what}, {passed:.0f} s"
        return f"{self._what} [{bar}] {share:4.0%}  {amount}, {passed:.0f} s"

    def _draw(self) -> None:
        if self._ended.wait(self._after):
            return
        while True:
            with self._lock:
                ProgressBar._shown = self
                self._put(_CLEAR + self.text()[: _columns(self._stream) - 1])
            if self._ended.wait(_EVERY_S):
                break
        with self._lock:
            ProgressBar._shown = None
            self._put(_CLEAR)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def line_above() -> Iterator[None]:
    """Let the ``with`` block print a line: the bar makes room, and is drawn again below it."""
    with ProgressBar._lock:
        if ProgressBar._shown is not None:
            ProgressBar._shown._put(_CLEAR)
        yield


def _can_move(stream: IO[str] | None) -> bool:
    try:
        is_terminal = stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
    return is_terminal and os.environ.get("TERM", "") not in ("", "dumb")


def _columns(stream: IO[str]) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _amount(value: float, unit: str) -> str:
    if unit != "B":
        return f"{value:.0f} {unit}".rstrip()
    for name in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {name}"
        value /= 1000
    return f"{value:.4g} TB"
