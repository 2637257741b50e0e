"""Attacks that try to have healthy nodes drained."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, QUIET, Room, become
from bench.common import BenchError
from lab import linux


def _unlinked(room: Room) -> Got:
    """Hold a deleted file that fills the node's /tmp."""
    linux.mount("tmpfs", "/tmp", "tmpfs", 0, "size=64m,mode=1777")
    room.site(f"disabled = {QUIET}")
    read, write = os.pipe()
    if os.fork() == 0:
        become(MALLORY)
        held = Path("/tmp/held")
        fd = os.open(held, os.O_RDWR | os.O_CREAT)
        held.unlink()
        os.posix_fallocate(fd, 0, 63 << 20)
        os.write(write, b".")
        time.sleep(1e6)
    if os.read(read, 1) != b".":
        raise BenchError("the file was not made")
    ended = room.gate("health.sweep")
    drained = room.drains()
    return Got(what=ended.said[:120] or "no word", drained=drained, succeeded=bool(drained))


ATTACKS = [
    Attack(
        name="disk_unlinked_file",
        row="drains",
        tries="a deleted file that is still open fills a file system of the node",
        run=_unlinked,
    ),
]
