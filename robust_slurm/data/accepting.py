"""Accept connections in a thread, which no error ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

PAUSE = 0.05  # s after an error that may well recur: a limit of the user, the job or the node


def accept_all(
    listener: socket.socket,
    begin: Callable[[socket.socket], None],
    closed: Callable[[], bool] = lambda: False,
) -> None:
    """Give each connection to ``begin``, until ``closed()``. If ``begin`` raises OSError, or
    RuntimeError for want of a thread, the connection is closed."""
    listener.settimeout(1.0)
    while not closed():
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # socket.timeout is another class before Python 3.10
            time.sleep(PAUSE)
            continue
        try:
            begin(sock)
        except (OSError, RuntimeError):
            sock.close()
            time.sleep(PAUSE)
