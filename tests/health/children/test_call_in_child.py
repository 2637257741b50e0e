"""A function called in a child process: its answer, its error, its deadline."""

from __future__ import annotations

import errno
import os
import threading

from health.children.call import call_in_child


def test_a_call_in_a_child_answers_or_says_why_not() -> None:
    def fails() -> None:
        raise PermissionError(errno.EPERM, "not root's", "file")

    def breaks() -> None:
        raise KeyError("no such")

    assert call_in_child(lambda: {"a": [1, None]}, 10) == ({"a": [1, None]}, "")
    assert call_in_child(fails, 10) == (None, "file: not root's")
    assert call_in_child(breaks, 10) == (None, "KeyError: 'no such'")
    assert call_in_child(lambda: os._exit(3), 10) == (None, "its process died")
    assert call_in_child(lambda: "x" * 3_000_000, 10)[0] == "x" * 3_000_000


def test_a_call_in_a_child_gives_up_at_its_deadline() -> None:
    assert call_in_child(threading.Event().wait, 0.2) == (None, "no answer in 0.2 s")
