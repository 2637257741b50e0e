"""The address of a network interface of this node."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")  # address, index, prefix length, scope, flags, name
_GLOBAL = "00"


def address(name: str) -> str:
    """Return an interface's IPv4 address, else its IPv6 address. Raises OSError without either."""
    socket.if_nametoindex(name)  # raises, and names of more than 15 bytes are no names
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            raw = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            return socket.inet_ntoa(raw[20:24])
        except OSError:  # none of this family
            pass
    for line in _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else ():
        digits, _, _, scope, _, of = line.split()
        if of == name and scope == _GLOBAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    raise OSError(f"interface {name} has no address")
