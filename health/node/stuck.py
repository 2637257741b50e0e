"""A record of processes that hang in the kernel, so that no further run adds one.

One small file per operation that hung, gone at the next boot. While the process that it names still
exists, the operation still hangs, and a repetition would only lose another process. A file system
that was silent has one as well, of no process, until it answers.
"""

from __future__ import annotations

import os
import time
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
            self._write(_name(key), "\n".join((str(pid), start_time(pid), what)))
        except (OSError, IndexError):
            pass  # the process has ended after all, or there is no place to write to

    def was_silent(self, key: str) -> None:
        """Remember that it did not answer now, whatever became of the process that asked."""
        try:
            self._write(_name(f"silent {key}"), f"0\n{int(time.monotonic())}\n")
        except OSError:
            pass

    def silent_for(self, key: str) -> float | None:
        """Seconds since it did not answer; None: it was not silent, or has answered since."""
        try:
            with closing(rootfiles.open_dir(self._directory)) as directory:
                name = _name(f"silent {key}")
                with closing(rootfiles.open_file(directory, name, os.O_RDONLY)) as fd:
                    return time.monotonic() - int(os.read(fd, _LIMIT).split(b"\n")[1])
        except (OSError, ValueError, IndexError):
            return None

    def answered(self, key: str) -> None:
        try:
            with closing(rootfiles.open_dir(self._directory)) as directory:
                os.unlink(_name(f"silent {key}"), dir_fd=directory)
        except OSError:
            pass

    def _write(self, name: str, text: str) -> None:
        try:
            os.mkdir(self._directory, 0o755)  # noqa: PTH102
        except FileExistsError:
            pass
        with closing(rootfiles.open_dir(self._directory)) as directory:
            rootfiles.replace(directory, name, text.encode()[:_LIMIT])

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
