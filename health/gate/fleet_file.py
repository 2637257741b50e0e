"""A file of the fleet's ledger that every gate writes to, one at a time.

``<state_dir>/nodes/<name>.jsonl``, root's as all beside it. Whoever holds the lock sees every
record before its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from health.history.events import NODES
from health.node import rootfiles

LOOK_BACK = 1 << 20  # bytes: ten thousand records


@contextmanager
def locked(state_dir: str, name: str) -> Iterator[int]:
    """Open such a file, made when needed, under its lock; it is cut when it has grown long.

    Raises OSError where there is no ledger to trust, and blocks while the file system or another
    gate does: call it in a child.
    """
    with ExitStack() as opened:
        nodes = rootfiles.open_dir(f"{state_dir}/{NODES}")
        opened.callback(os.close, nodes)
        opened.callback(os.close, rootfiles.lock(nodes, f"{name}.lock"))
        file = f"{name}.jsonl"
        fd = rootfiles.open_file(nodes, file, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        opened.callback(os.close, fd)
        yield fd
        if os.fstat(fd).st_size > 2 * LOOK_BACK:
            rootfiles.replace(nodes, file, rootfiles.tail(fd, LOOK_BACK))
