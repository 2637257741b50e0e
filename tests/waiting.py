"""Wait for what a test can see, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(
    condition: Callable[[], Any], what: str, timeout: float = 60.0, every: float = 0.02
) -> None:
    """Wait until a condition holds, asked every so many seconds.

    AssertionError naming it after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(every)
