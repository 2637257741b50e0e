"""The namespaces that tests run in: nothing piles up there, and nothing stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from isolated import isolated
from waiting import until


def zombies() -> int:
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found += stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@isolated
def test_orphans_are_reaped() -> None:
    for _ in range(30):
        middle = os.fork()
        if middle == 0:
            os.fork()
            os._exit(0)
        os.waitpid(middle, 0)
    until(lambda: not zombies(), "no zombies", 15)
