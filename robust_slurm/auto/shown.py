"""A process as others see it in /proc: its command line and its environment at exec.

``ps``, ``pgrep -f`` and monitoring tools read both from the process's own memory, where exec put
them. A warm interpreter must not look like a rank there, and a rank that was forked from it must.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os

from robust_slurm import process_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PAD = "ROBUST_WARM_PAD"
"""A variable that makes room for a larger environment than the first one."""
PADDING = " " * 8192
_ADDRESSES = slice(45, 49)  # of arguments and environment: fields 48 to 51 of /proc/self/stat
_PR_SET_NAME = 15


class Shown:
    """Made before the first change; the C library has an environment of its own by then."""

    def __init__(self) -> None:
        own = process_stat.read("self")
        begin, end, env_begin, env_end = (int(text) for text in own.fields[_ADDRESSES])
        self._arguments = (begin, end)
        self._environ = (env_begin, env_end)
        with open("/proc/self/cmdline", "rb") as file:
            self.words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
        self.name = own.name

    def change(self, name: str, words: Iterable[str], environ: Iterable[str]) -> None:
        """Show these; what does not fit is left out."""
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(name), 0, 0, 0)
        for (begin, end), strings in ((self._arguments, words), (self._environ, environ)):
            room = end - begin
            if begin <= 0 or room <= 0:
                continue
            data = b""
            for string in strings:
                more = os.fsencode(string) + b"\0"
                if len(data) + len(more) <= room:
                    data += more
            ctypes.memmove(begin, data.ljust(room, b"\0"), room)


def own(environ: dict[str, str]) -> None:
    """Replace the environment; the C library then holds copies, not the memory of exec."""
    os.environ.clear()
    os.environ.update(environ)
