"""The messages between robust-task and its warm interpreter, over a socket.

Runs in interpreters that are not ours: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, NoReturn

_LENGTH = 8
_MOST_FDS = 4


def receive(link: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and its descriptors. Ends this process if the shim has ended."""
    import json
    import socket

    head, fds, _, _ = socket.recv_fds(link, _LENGTH, _MOST_FDS)
    while 0 < len(head) < _LENGTH:
        head += link.recv(_LENGTH - len(head)) or b"\0" * _LENGTH
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        more = link.recv(size - len(body))
        if not more:
            size = 0
            break
        body += more
    if not size:
        os._exit(0)
    return json.loads(body), fds


def send(link: socket.socket, message: dict[str, Any]) -> None:
    import json

    link.sendall(json.dumps(message).encode() + b"\n")


def give_up(fd: int, why: str) -> NoReturn:
    import json

    try:
        os.write(fd, json.dumps({"over": why[:1000]}).encode() + b"\n")
    finally:
        os._exit(1)
