"""A real file system (FUSE) that stops answering; in mount and process namespaces of the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import linux
from lab.machine import fuse
from lab.spec import SCRATCH_TYPE


class Stalling:
    """``server``: the process that answers for the mount."""

    def __init__(self, server: int) -> None:
        self._server = server

    def stall(self) -> None:
        """Stop the server: processes that use the mount wait, and cannot be killed."""
        os.kill(self._server, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._server, signal.SIGCONT)


@contextmanager
def stalling(path: Path) -> Iterator[Stalling]:
    """Mount one at ``path``, an empty directory."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    linux.mount("test", str(path), SCRATCH_TYPE, 0, fuse.options(device))
    server = os.fork()
    if server == 0:
        fuse.serve(device)
    os.close(device)
    try:
        fuse.probe(str(path))
        yield Stalling(server)
    finally:
        os.kill(server, signal.SIGKILL)  # whoever waits gets an error
        os.waitpid(server, 0)
