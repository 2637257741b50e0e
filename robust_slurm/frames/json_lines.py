"""Messages between processes of a node: one JSON object a line over a unix socket.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the other end; the pid is 0 if it is of another pid namespace.
    Raises OSError."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return int(pid), int(uid)


def ours(uid: int) -> bool:
    """Return whether to trust a peer of this user: our own user, or root."""
    return uid in (os.geteuid(), 0)


def encode(message: dict[str, Any]) -> bytes:
    """Return the line of a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Return the message of a line: an object with "op". Raises ValueError with the reason."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"a line is not JSON: {str(err)[:100]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError('a line is no object with "op"')
    return message
