"""Detect a shared directory whose file system does not answer, and report it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SILENT = 5.0  # s without an answer before it is reported
PAUSE = 2.0  # s between two questions
ANSWER = 1.0  # s that a training step may wait for whether a file is there


class FileLook:
    """Looks for a file in a thread of its own; belongs to one other thread."""

    def __init__(self) -> None:
        self._found = False
        self._over = threading.Event()
        self._over.set()

    def finds(self, path: Path) -> bool:
        """True if it is there, or was when its file system last answered. Waits ``ANSWER`` s at
        most; while an earlier question is open, it neither asks again nor waits."""
        if self._over.is_set():
            self._over.clear()
            args = (path,)
            threading.Thread(target=self._look, args=args, name="robust-asks", daemon=True).start()
            self._over.wait(ANSWER)
        return self._found

    def _look(self, path: Path) -> None:
        try:
            self._found = path.exists()
        except OSError:
            pass  # as without an answer
        finally:
            self._over.set()


@contextmanager
def reported(directory: str, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report, meanwhile, that ``what`` waits for ``directory``, and when it answers again.

    It asks by a call of its own (statvfs), as reading a large checkpoint may take long.
    """
    over = threading.Event()
    if directory:
        args = directory, what, say, over
        threading.Thread(target=_ask, args=args, name="robust-asks", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _ask(directory: str, what: str, say: Callable[[str], None], over: threading.Event) -> None:
    def late() -> None:
        if not over.is_set():
            say(
                f"{what} waits: {directory} has not answered for {SILENT:.0f} s; {what} continues "
                f"when its file system answers"
            )

    while not over.is_set():
        began = time.monotonic()
        timer = threading.Timer(SILENT, late)
        timer.daemon = True
        timer.start()
        with suppress(OSError):  # an error is an answer, too
            os.statvfs(directory)
        timer.cancel()
        waited = time.monotonic() - began
        if waited >= SILENT:
            say(f"{directory} answers again after {waited:.0f} s")
        over.wait(PAUSE)
