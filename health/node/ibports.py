"""RDMA ports as /sys/class/infiniband shows them (Documentation/ABI/stable/sysfs-class-infiniband).

InfiniBand, RoCE and the cloud's own adapters alike. Every counter that is read costs a command to
the adapter, so only those that are judged are.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from health.node.sysfs import names, number, text
from health.node.system import System
from robust_slurm.error_counters import LINK_COUNTERS, RETRY_COUNTERS

BASE = "/sys/class/infiniband"

_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((\d+)X)?")


class Port(NamedTuple):
    """One port. ``name`` is the adapter's, with /2 and so on from its second port on."""

    name: str
    state: str  # "ACTIVE", "INIT", "ARMED", "DOWN"
    physical: str  # "LinkUp", "Polling", "Disabled", …
    link: str  # "InfiniBand", "Ethernet", "Unspecified"
    rate: float  # Gb/s; 0: not told
    width: int  # lanes; 0: not told
    board: str
    firmware: str
    counters: dict[str, int]  # those that could be read

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def was_used(self) -> bool:
        """True if the port was up since boot, so has a cable: it received, or lost its link."""
        read = self.counters.get
        return read("port_rcv_packets", 0) > 0 or read("link_downed", 0) > 0


def parse_rate(content: str) -> tuple[float, int]:
    """ "400 Gb/sec (4X NDR)" -> (400.0, 4); zeros for what is not there."""
    match = _RATE.match(content)
    return (float(match[1]), int(match[2] or 0)) if match else (0.0, 0)


def parse_state(content: str) -> str:
    """ "4: ACTIVE" -> "ACTIVE"."""
    return content.partition(":")[2].strip()


def ports(system: System) -> list[Port]:
    """All ports of all adapters, in the order of their names; none where there is no RDMA."""
    return [
        _port(system, adapter, port)
        for adapter in sorted(names(system, BASE), key=_natural)
        for port in names(system, f"{BASE}/{adapter}/ports")
    ]


def _port(system: System, adapter: str, port: str) -> Port:
    base = f"{BASE}/{adapter}/ports/{port}"
    state = parse_state(text(system, f"{base}/state"))
    rate, width = parse_rate(text(system, f"{base}/rate"))
    wanted = [f"counters/{name}" for name in LINK_COUNTERS]
    if state == "ACTIVE":
        wanted += [f"hw_counters/{name}" for name in RETRY_COUNTERS]
    else:
        wanted = ["counters/port_rcv_packets", "counters/link_downed"]
    read = {path.partition("/")[2]: number(system, f"{base}/{path}") for path in wanted}
    return Port(
        name=adapter if port == "1" else f"{adapter}/{port}",
        state=state,
        physical=parse_state(text(system, f"{base}/phys_state")),
        link=text(system, f"{base}/link_layer"),
        rate=rate,
        width=width,
        board=text(system, f"{BASE}/{adapter}/board_id"),
        firmware=text(system, f"{BASE}/{adapter}/fw_ver"),
        counters={name: value for name, value in read.items() if value is not None},
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
