"""See whether rank 0's store is there: the ranks that look for it too early lose half a second.

On rank 0's machine the kernel is asked (sock_diag(7)), which looks at listeners alone;
/proc/net/tcp costs milliseconds where its table of connections is large, however few there are.
From other machines it is connected to and left again, which torch's store takes without a word.
Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20  # the type of the request, and of each socket in the answer
_REQUEST_DUMP = 0x301
_LISTEN = 1 << 10  # the state, in the set of those that are asked for
_TIMEOUT = 1.0  # s; the answer is there at once
_MOST_WAIT = 1.0  # s
_LOOK = 0.005  # s between two looks for rank 0's store
_SPREAD = 0.0001  # s for each rank of the job: its ranks connect 10,000 times a second at most
STORE = "torch.distributed"
"""The module whose ranks look for rank 0's store, and come again only later if it is not there."""


def hold(begin: float) -> None:
    """Wait until ``begin`` (time.monotonic) or until rank 0's store is there.

    That is what is waited for: not at all where nobody will look for it.
    """
    if STORE not in sys.modules:
        return
    end = min(begin, time.monotonic() + _MOST_WAIT)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not _valid(port):
        _sleep(end, _MOST_WAIT)
    elif not _elsewhere(address):
        _look(end, _LOOK, lambda: listens(port))
    else:
        rank, ranks = _number("RANK"), _number("WORLD_SIZE")
        every = max(_LOOK, ranks * _SPREAD)
        _sleep(end, every * rank / max(ranks, 1))  # each in its turn
        _look(end, every, lambda: accepts(address, port, end))


def _look(end: float, every: float, there: Callable[[], bool]) -> None:
    while time.monotonic() < end and not there():
        _sleep(end, every)


def _sleep(end: float, seconds: float) -> None:
    time.sleep(max(0.0, min(seconds, end - time.monotonic())))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _valid(port: str) -> bool:
    return port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16


def _elsewhere(address: str) -> bool:
    """True for the address, in numbers, of another machine: no name is looked up here."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)
    except (OSError, ValueError):
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return True
    return False


def accepts(address: str, port: str, end: float) -> bool:
    """True if a connection to the port was made, before ``end``; it is closed at once."""
    try:
        socket.create_connection((address, int(port)), max(0.001, end - time.monotonic())).close()
    except OSError:
        return False
    return True


def listens(port: str) -> bool:
    """True if any process of this network namespace listens on the port, on any address. False if
    the kernel does not answer, or if ``port`` is no port number."""
    if not _valid(port):
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
