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
    """Return a TCP port on which nothing on this node listens.

    It is below the ephemeral range, unless that starts below FIRST + 1000: any outgoing connection
    could take a port of that range between this look and the moment rank 0 listens there.
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
