"""Whether something listens on a TCP port of this machine, without connecting to it.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTENING = b"0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def listens(port: int) -> bool:
    """Whether any process of this network namespace does, on any address."""
    for table in _TABLES:
        try:
            with open(table, "rb") as file:
                next(file, None)
                if _listed(file, port):
                    return True
        except OSError:
            continue
    return False


def _listed(lines: Iterable[bytes], port: int) -> bool:
    end = b":%04X" % port
    for line in lines:
        _, local, _, state, _ = line.split(None, 4)
        if state != _LISTENING:
            return False  # the kernel lists those that listen first
        if local.endswith(end):
            return True
    return False
