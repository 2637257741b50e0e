"""What earlier runs left behind in the kernel, so that the next ones do not pile up more.

One small file per thing that hung, <spool>/stuck/<key>: as long as the process that it names is
still there, what it was doing still hangs, and doing it again would only lose another process.
"""

from __future__ import annotations

import os
import zlib

from health import rootfiles
from health.child import start_time

_LIMIT = 4096  # bytes


class Stuck:
    """``spool`` belongs to root; where it cannot be written nothing is remembered."""

    def __init__(self, spool: str, boot_id: str):
        self._spool = spool
        self._boot_id = boot_id

    def remember(self, key: str, pid: int, what: str) -> None:
        """``pid`` could not be killed while it did ``what``."""
        try:
            text = "\n".join((self._boot_id, str(pid), start_time(pid), what))
            directory = self._open(create=True)
            try:
                rootfiles.replace(directory, _name(key), text.encode()[:_LIMIT])
            finally:
                os.close(directory)
        except (OSError, IndexError):
            pass  # the process has ended after all, or there is no place to write to

    def still(self, key: str) -> str:
        """What hung and still does; empty when nothing is left of it."""
        try:
            directory = self._open()
            try:
                return self._still(directory, _name(key))
            finally:
                os.close(directory)
        except (OSError, ValueError, IndexError):
            return ""

    def _still(self, directory: int, name: str) -> str:
        fd = rootfiles.open_file(directory, name, os.O_RDONLY)
        try:
            text = os.read(fd, _LIMIT).decode("utf-8", "replace")
        finally:
            os.close(fd)
        boot_id, pid, started, what = text.split("\n", 3)
        try:
            if boot_id == self._boot_id and start_time(int(pid)) == started:
                return f"{what} (process {int(pid)} still hangs)"
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended
        os.unlink(name, dir_fd=directory)
        return ""

    def _open(self, create: bool = False) -> int:
        directory = rootfiles.open_dir(self._spool)
        try:
            if create:
                try:
                    os.mkdir("stuck", 0o700, dir_fd=directory)
                except FileExistsError:
                    pass
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open("stuck", flags, dir_fd=directory)
        finally:
            os.close(directory)


def _name(key: str) -> str:
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in key)
    return f"{plain[:100]}.{zlib.crc32(key.encode()):08x}"
