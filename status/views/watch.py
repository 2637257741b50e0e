"""``--watch``: the same view again and again, in place where a terminal shows it."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import IO

from robust_slurm.command_line.plain_text import output, styled

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
CLEAR = "\x1b[2J"


class _Page(io.StringIO):
    """Text in memory that passes for the terminal that it will be written to."""

    def __init__(self, real: IO[str]) -> None:
        super().__init__()
        self._real = real

    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()


def watch(
    show: Callable[[IO[str]], int],
    every: float,
    out: IO[str],
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Show until interrupted; return the last exit code. ``wait`` may raise KeyboardInterrupt.

    Each page is written at once, so that the screen does not flicker.
    """
    in_place = out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    code, first = 0, True
    try:
        while True:
            page = _Page(out)
            code = show(output(page))
            lines = [*page.getvalue().splitlines(), time.strftime("%H:%M:%S") + "  ^C ends"]
            if in_place:
                text = HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW
                styled(out).write((CLEAR if first else "") + text)
            else:
                styled(out).write("\n".join(lines) + "\n\n")
            out.flush()
            first = False
            wait(every)
    except KeyboardInterrupt:
        return code
