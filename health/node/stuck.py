"""A record of processes that hang in the kernel, so that no further run adds one.

One small file per operation that hung, gone at the next boot. While the process that it names still
exists, the operation still hangs, and a repetition would only lose another process.
"""

from __future__ import annotations

import os
import zlib

from health.children.child import start_time
from health.node import rootfiles
from health.node.rootfiles import closing
from health.node.system import System

DIRECTORY = "/run/robust-slurm"
_LIMIT = 4096  # bytes


class Stuck:
    """``directory`` is root's and made when needed; where that fails nothing is remembered."""

    def __init__(self, directory: str = DIRECTORY):
        self._directory = directory

    def remember(self, key: str, pid: int, what: str) -> None:
        """``pid`` could not be killed while it did ``what``."""
        try:
            text = "\n".join((str(pid), start_time(pid), what))
            try:
                os.mkdir(self._directory, 0o755)  # noqa: PTH102
            except FileExistsError:
                pass
            with closing(rootfiles.open_dir(self._directory)) as directory:
                rootfiles.replace(directory, _name(key), text.encode()[:_LIMIT])
        except (OSError, IndexError):
            pass  # the process has ended after all, or there is no place to write to

    def still(self, key: str) -> str:
        """The operation that hung and still does; empty when nothing is left of it."""
        try:
            with closing(rootfiles.open_dir(self._directory)) as directory:
                return _still(directory, _name(key))
        except (OSError, ValueError, IndexError):
            return ""


def left_behind(system: System, directory: str = DIRECTORY) -> set[tuple[int, int]]:
    """Pids and start times of the processes that were remembered here and may still hang."""
    found = set()
    try:
        for name in system.names(directory):
            pid, started = system.read(f"{directory}/{name}").split("\n")[:2]
            found.add((int(pid), int(started)))
    except (OSError, ValueError):
        pass  # nothing was ever left behind, or it is removed just now
    return found


def _still(directory: int, name: str) -> str:
    with closing(rootfiles.open_file(directory, name, os.O_RDONLY)) as fd:
        text = os.read(fd, _LIMIT).decode("utf-8", "replace")
    pid, started, what = text.split("\n", 2)
    try:
        if start_time(int(pid)) == started:
            return f"{what} (process {int(pid)} still hangs)"
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
    os.unlink(name, dir_fd=directory)
    return ""


def _name(key: str) -> str:
    """A file name for a key, of this boot: nodes of one machine may share the directory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in key)
    return f"{boot}.{plain[:100]}.{zlib.crc32(key.encode()):08x}"
