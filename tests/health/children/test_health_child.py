"""Forked children: what they hold of their parent, and that they end without it."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from health.children import child


def test_a_child_holds_nothing_of_its_parent_open() -> None:
    """slurmd reads a prolog's output to its end: a hung child must not keep it open."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    stuck_child = child.fork(lambda fd: (child.write_all(fd, b"x"), time.sleep(60))[0], 60.0)
    try:
        os.close(write_end)
        poll = select.poll()
        poll.register(stuck_child.fd, select.POLLIN)
        assert poll.poll(10_000)  # it runs
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        assert poll.poll(10_000) and os.read(read_end, 1) == b""
        assert os.getsid(stuck_child.pid) == stuck_child.pid
        for fd in (0, 1, 2):
            assert Path(f"/proc/{stuck_child.pid}/fd/{fd}").readlink() == Path(os.devnull)
    finally:
        stuck_child.stop(5.0)
        stuck_child.close()
        os.close(read_end)


def test_a_child_ends_by_itself_when_its_parent_has_gone() -> None:
    alone = child.fork(lambda fd: time.sleep(60), -child._SPARE_S + 0.2)
    assert alone.ended(10.0) == -14  # SIGALRM
    alone.close()
