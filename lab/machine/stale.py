"""Mounts in a node whose server (lab/machine/fuse.py) the keeper holds."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lab import inside, linux
from lab.errors import LabError
from lab.machine import fuse
from lab.spec import SCRATCH_TYPE

_DEVICE = "/dev/fuse"


@dataclass
class Mount:
    """A mount at `path`, and the process that answers for it."""

    path: str
    server: int
    stale: bool = False
    stalled: bool = False

    @classmethod
    def make(cls, pid: int, path: str, own: str, fstype: str = SCRATCH_TYPE) -> Self:
        """Mount a healthy file system at `path` in the mount namespace of process `pid`.

        A directory that is not there is made if it is below `own` or /tmp, which are the node's.
        """
        try:
            device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LabError(f"{_DEVICE}: {error.strerror}; try: modprobe fuse") from None
        try:
            inside.run(pid, lambda: _mount(device, path, fstype, (own, "/tmp")), keep=device)
            server = _start_server(device)
        finally:
            os.close(device)  # the server's is the last one: its end aborts the connection
        try:
            inside.run(pid, lambda: fuse.probe(path))
        except BaseException:
            _kill(server)
            raise
        return cls(path, server)

    def make_stale(self) -> None:
        """Answer nothing from now on."""
        os.kill(self.server, signal.SIGUSR1)
        self.stale = True

    def stall(self, on: bool) -> None:
        """Stop the server, or continue it: requests made meanwhile wait, and are answered then."""
        if self.stalled != on:
            os.kill(self.server, signal.SIGSTOP if on else signal.SIGCONT)
            self.stalled = on

    def end(self) -> None:
        """Kill the server: the kernel wakes all who wait for it, with an error."""
        _kill(self.server)

    def take_away(self, pid: int) -> None:
        """End it and unmount it in the mount namespace of process `pid`."""
        self.end()
        inside.run(pid, lambda: linux.unmount(self.path))


def _start_server(device: int) -> int:
    server = os.fork()
    if server == 0:
        try:
            inside.leave_keeper(device)
            os.setsid()
            fuse.serve(device)
        finally:
            os._exit(1)
    return server


def _kill(server: int) -> None:
    try:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    except (ProcessLookupError, ChildProcessError):  # it ended, and was reaped
        pass


def _mount(device: int, path: str, fstype: str, own: tuple[str, ...]) -> None:
    target = Path(path)
    if any(path.startswith(f"{top}/") for top in own):
        target.mkdir(parents=True, exist_ok=True)
    if not target.is_dir():
        raise LabError(f"{path} is not a directory in the node; use one below {own[0]} or make it")
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("lab", path, fstype, quiet, fuse.options(device))
