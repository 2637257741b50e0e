"""Find a listener on a TCP port of this machine, without connecting to it: rank 0's store.

Asks the kernel (sock_diag(7)), which looks at listeners alone; /proc/net/tcp costs milliseconds
where its table of connections is large, however few there are. Standard library only, Python 3.9
syntax.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20  # the type of the request, and of each socket in the answer
_REQUEST_DUMP = 0x301
_LISTEN = 1 << 10  # the state, in the set of those that are asked for
_TIMEOUT = 1.0  # s; the answer is there at once
_MOST_WAIT = 1.0  # s
_LOOK = 0.005  # s between two looks for rank 0's store
STORE = "torch.distributed"
"""The module whose ranks look for rank 0's store, and come again only later if it is not there."""


def hold(begin: float) -> None:
    """Wait until ``begin`` (time.monotonic) or until this machine has rank 0's store.

    That is what is waited for: not at all where nobody will look for it.
    """
    if STORE not in sys.modules:
        return
    port = os.environ.get("MASTER_PORT", "")
    end = min(begin, time.monotonic() + _MOST_WAIT)
    while time.monotonic() < end and not listens(port):
        time.sleep(max(0.0, min(_LOOK, end - time.monotonic())))


def listens(port: str) -> bool:
    """True if any process of this network namespace listens on the port, on any address. False if
    the kernel does not answer, or if ``port`` is no port number."""
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        return False
    try:
        return any(_found(family, int(port)) for family in (socket.AF_INET, socket.AF_INET6))
    except (OSError, struct.error):
        return False


def _found(family: int, port: int) -> bool:
    what = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _LISTEN)
    which = struct.pack("!HH", port, 0) + bytes(44)  # any addresses, any interface
    size = 16 + len(what) + len(which)
    head = struct.pack("=IHHII", size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT)
        kernel.sendall(head + what + which)
        answer = kernel.recv(1 << 13)
    return bool(struct.unpack_from("=IH", answer)[1] == _SOCK_DIAG_BY_FAMILY)
