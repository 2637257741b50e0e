"""A free port for MASTER_PORT."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 20000


def _ephemeral_start() -> int:
    try:
        words = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(words[0])
    except (OSError, ValueError, IndexError):
        return 32768


def free_port() -> int:
    """A TCP port that nothing on this node listens on, below the ephemeral range.

    Ports in the ephemeral range could be taken by any outgoing connection between this look and
    the moment rank 0 listens there.
    """
    last = max(FIRST + 1000, _ephemeral_start())
    for _ in range(64):
        port = random.randrange(FIRST, last)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
