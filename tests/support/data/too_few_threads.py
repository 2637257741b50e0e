"""A process that may have no more threads, for once."""

from __future__ import annotations

import threading

import pytest


def refuse_once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Have the first thread of this name not start. The list is empty once that has happened."""
    start, refused = threading.Thread.start, [name]

    def started(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    return refused
