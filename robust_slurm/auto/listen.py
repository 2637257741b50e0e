"""A socket beside a rank's heartbeat on which the rank answers robust-task, in a thread.

Runs in the rank: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_lines: list[Any] = []


def listen(path: str, backlog: int, answer: Callable[..., None], *args: Any) -> None:
    """Listen at ``path``, and call ``answer(socket, *args)`` in a thread. Raises OSError."""
    import socket
    import threading

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.unlink(path)  # noqa: PTH108 - pathlib may not be loaded
    except FileNotFoundError:
        pass
    line.bind(path)
    line.listen(backlog)
    _lines.append(line)
    threading.Thread(target=answer, args=(line, *args), name="robust-slurm", daemon=True).start()


def end() -> None:
    """Wake all threads that accept, with an OSError: this process is of another epoch now."""
    import socket

    while _lines:
        try:
            _lines.pop().shutdown(socket.SHUT_RDWR)
        except OSError:  # closed
            pass
