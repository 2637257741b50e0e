"""See whether rank 0's store is there: the ranks that look for it too early lose half a second.

On rank 0's machine the kernel is asked (sock_diag(7)), which looks at listeners alone;
/proc/net/tcp costs milliseconds where its table of connections is large, however few there are.
From other machines one rank of each connects to the store and leaves again, but only where it is
known to be torch's: what else may listen there would take that for one of its own. torch looks up
the name of whoever connects, one after another, so there must not be many.
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
    from typing import Any

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20  # the type of the request, and of each socket in the answer
_REQUEST_DUMP = 0x301
_LISTEN = 1 << 10  # the state, in the set of those that are asked for
_TIMEOUT = 1.0  # s; the answer is there at once
_MOST_WAIT = 1.0  # s
_BLIND = 0.15  # s for rank 0 where nobody can see whether its store is there
_LOOK = 0.005  # s between two looks for rank 0's store
_SPREAD = 0.001  # s for each node of the job: all of them visit the store 1,000 times a second
_MOST_NODES = 64  # in a larger job most would come too late
STORE = "torch.distributed"
"""The module whose ranks look for rank 0's store, and come again only later if it is not there."""
_C10D = "torch.distributed.distributed_c10d"
visits = False
"""This program is known to use torch's own store at MASTER_PORT."""


def hold(begin: float) -> None:
    """Wait until ``begin`` (time.monotonic) or until rank 0's store is there.

    A process that will not look for that store does not wait. Raises nothing.
    """
    try:
        _hold(begin)
    except Exception:  # noqa: BLE001 - a lost head start must never cost the script
        pass


def _hold(begin: float) -> None:
    now = time.monotonic()
    end = min(begin, now + _MOST_WAIT)
    if now >= end or STORE not in sys.modules or os.environ.get("RANK") == "0":
        return
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if _valid(port) and not _elsewhere(address):
        _look(end, _LOOK, lambda: listens(port))
        return
    nodes = _number("SLURM_NNODES")
    sees = visits and _valid(port) and 0 < nodes <= _MOST_NODES
    if not sees:
        end = min(end, now + _BLIND)
    if os.environ.get("LOCAL_RANK") != "0":
        _look(end, _LOOK, lambda: os.path.exists(_mark()))  # noqa: PTH110
        return
    if sees:
        every = max(_LOOK, nodes * _SPREAD)
        _sleep(end, every * _number("NODE_RANK") / nodes)  # each node in its turn
        _look(end, every, lambda: accepts(address, port, end))
    else:
        _sleep(end, _BLIND)
    os.close(os.open(_mark(), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _mark() -> str:
    """The file that says that this node's first rank goes on; removed with the epoch's others."""
    return f"{os.environ['ROBUST_BEAT_DIR']}/{os.environ['ROBUST_EPOCH']}-0.store"


def is_used() -> bool:
    """True if the default process group was made with torch's own store at MASTER_PORT."""
    c10d: Any = sys.modules.get(_C10D)
    try:
        store = c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(store.port) == os.environ["MASTER_PORT"]
    except Exception:  # noqa: BLE001 - an unusual torch, or no process group
        return False


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


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _elsewhere(address: str) -> bool:
    """True for the address, in numbers, of another machine: no name is looked up here."""
    try:
        socket.inet_pton(_family(address), address)
    except (OSError, ValueError):
        return False
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return True
    return False


def accepts(address: str, port: str, end: float) -> bool:
    """True if a connection to the port was made, before ``end``; it is closed at once."""
    try:
        # Not by create_connection: that imports what it takes to look up names.
        with socket.socket(_family(address)) as one:
            one.settimeout(max(0.001, end - time.monotonic()))
            one.connect((address, int(port)))
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
