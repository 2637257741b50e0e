"""The lab's network, in the keeper's network namespace: how the ports of the nodes are joined.

A small lab has a switch: a bridge. Linux allows 1,024 ports on one, and by default 1,024 entries in
the table of neighbours that all network namespaces share. A large lab has a router instead: a
route to each port, and no ARP at all. Both ends of a link have the same hardware address then, so
every frame is for whoever receives it.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.errors import LabError
from lab.spec import mac

BRIDGE = "switch"
_ROUTER = "10.77.255.254"  # the address of the router's end of each link
_NET = "10.77.0.0/16"
_WAIT_S = 30.0


def build(routed: bool) -> None:
    """Make the switch or the router. Raises LabError."""
    run_ip(start_lines(routed))
    if routed:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")


def start_lines(routed: bool) -> list[str]:
    """Return what `ip` must do before there are ports.

    The kernel drops the route of a port that is down; what goes there then vanishes, as on a
    network whose hosts are silent.
    """
    if routed:
        return ["link set lo up", f"route add blackhole {_NET}"]
    return [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up", "link set lo up"]


def port_lines(routed: bool, port: str, node: str, address: str, pid: int) -> list[str]:
    """Return what `ip` must do to join a node: `port` here, eth0 in the namespace of `pid`."""
    own = f"address {mac(node)}"
    if not routed:
        return [
            f"link add {port} type veth peer name eth0 {own} netns {pid}",
            f"link set {port} master {BRIDGE} up",
        ]
    return [
        f"link add {port} {own} arp off type veth peer name eth0 {own} arp off netns {pid}",
        # As long as it has this address, the port gets its route back whenever it comes up.
        f"addr add {_ROUTER} peer {address} dev {port}",
        f"link set {port} up",
    ]


def run_ip(lines: Sequence[str]) -> None:
    """Run lines of `ip`, in one process. Raises LabError."""
    try:
        result = subprocess.run(
            ["ip", "-batch", "-"],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"ip -batch: not done within {_WAIT_S:.0f} s") from None
    if result.returncode != 0:
        raise LabError(f"ip -batch failed: {result.stderr.strip()}")
