"""The namespaces that tests run in: nothing piles up there, and nothing stays."""

from __future__ import annotations

import gc
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


class Garbage:
    """An object that only a search finds, and whose end ends the process."""

    def __init__(self) -> None:
        self.itself = self
        self.parent = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.parent:
            os._exit(3)


def test_a_forked_process_leaves_the_garbage_of_its_parent_alone() -> None:
    """A process group of torch's in it would be waited for without end."""
    searches = gc.isenabled()
    gc.disable()
    try:
        Garbage()
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.collect()
        if searches:
            gc.enable()


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
