"""Ethernet: the interfaces that the node needs are there, up, and as fast as wanted.

Without settings those are the interfaces of the default route. Counters are since boot and only
ever make a WARN: one bad hour last week would keep the node out until it is booted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.sysfs import fleet, names, number, text
from health.node.system import System

MISSING = Condition(
    "ethernet-missing", "FAIL", "node", "reboot", "an expected interface is missing"
)
DOWN = Condition(
    "ethernet-down",
    "FAIL",
    "node",
    "none",
    "an expected interface, or every interface of the default route, has no link; WARN if another "
    "default route has one",
)
SLOW = Condition(
    "ethernet-slow",
    "FAIL",
    "node",
    "none",
    "slower than the setting or the fleet's record requires",
)
HALF = Condition("ethernet-half-duplex", "WARN", "node", "none", "the link is half duplex")
BOND = Condition("bond-degraded", "WARN", "node", "none", "a member of a bond has no link")
ERRORS = Condition("ethernet-errors", "WARN", "node", "none", "many frames arrive damaged")
FLAPS = Condition("ethernet-flaps", "WARN", "node", "none", "the link went down often since boot")
SETTING = Condition(
    "ethernet-setting", "WARN", "tool", "none", "an entry of `expected` cannot be used"
)

BASE = "/sys/class/net"
# IEEE 802.3 wants a bit error rate of 1e-12, about one frame of 1500 bytes in 1e8.
CRC_SHARE, CRC_COUNT = 1e-6, 100
FLAPS_PER_DAY = 5
DAY = 86_400


def parse_expected(entry: str) -> tuple[str, int]:
    """ "eth0" or "eth0:25000" -> (name, Mb/s; 0: any). ValueError says what is wrong."""
    name, _, speed = entry.partition(":")
    if not name or "/" in name or (speed and not speed.isdigit()) or entry.endswith(":"):
        raise ValueError(f"{entry!r}: use INTERFACE or INTERFACE:MBITS")
    return name, int(speed or 0)


def default_interfaces(route: str, route6: str) -> list[str]:
    """Interfaces of the default routes, from /proc/net/route or else /proc/net/ipv6_route."""
    out: dict[str, None] = {}
    for line in route.splitlines()[1:]:
        fields = line.split()
        # destination and mask 0, and RTF_UP without RTF_REJECT
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            flags = int(fields[3], 16)
            if flags & 0x1 and not flags & 0x200:
                out[fields[0]] = None
    if out:
        return list(out)
    for line in route6.splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[1] == "00" and not fields[0].strip("0"):
            flags = int(fields[8], 16)
            if flags & 0x3 == 0x3 and not flags & 0x200:  # up, through a gateway
                out[fields[9]] = None
    return list(out)


def has_link(carrier: str, operstate: str) -> bool:
    """True if the interface has a link, or its driver does not report one ("unknown")."""
    if carrier in ("0", "1"):
        return carrier == "1"
    return operstate not in ("down", "lowerlayerdown", "notpresent")


def judge_counters(name: str, values: Mapping[str, int], uptime: float) -> list[Finding]:
    """``values``: crc, packets, downs: since boot."""
    found = []
    crc, packets = values.get("crc", 0), values.get("packets", 0)
    if crc > CRC_COUNT and crc > CRC_SHARE * (packets + crc):
        said = f"{crc} of {packets + crc} frames damaged (rx_crc_errors), limit {CRC_SHARE:g}"
        found.append(ERRORS.found(said, name))
    downs = values.get("downs", 0)
    rate = downs * DAY / max(uptime, DAY)
    if rate > FLAPS_PER_DAY:
        said = f"link down {downs} times since boot, {rate:.1f} a day, limit {FLAPS_PER_DAY}"
        found.append(FLAPS.found(said, name))
    return found


def _run(system: System) -> list[Finding]:
    found: list[Finding] = []
    expected: dict[str, int] = {}
    for entry in system.options("ethernet")["expected"]:
        try:
            name, speed = parse_expected(entry)
            expected[name] = speed
        except ValueError as error:
            found.append(SETTING.found(f"ethernet.expected: {error}"))
    recorded = _recorded(fleet(system).get("ethernet"))
    expected = expected or recorded
    here = names(system, BASE)
    if expected:
        for name in expected:
            if name not in here:
                found.append(MISSING.found(f"no {BASE}/{name}", name))
            elif not _link(system, name):
                found.append(_down(system, name))
    else:
        found += _default(system, here, expected)
    uptime = system.uptime()
    for name in expected:
        if name in here:
            found += _quality(system, name, expected[name] or recorded.get(name, 0), uptime)
    return found


def _default(system: System, here: list[str], expected: dict[str, int]) -> list[Finding]:
    """Put the interfaces of the default routes into ``expected``; report those without a link."""
    expected.update((name, 0) for name in _routed(system) if name in here)
    down = [name for name in expected if not _link(system, name)]
    if len(down) == len(expected):
        return [_down(system, name) for name in down]
    return [_down(system, name)._replace(status="WARN") for name in down]


def _routed(system: System) -> list[str]:
    route, route6 = text(system, "/proc/net/route"), text(system, "/proc/net/ipv6_route")
    return default_interfaces(route, route6)


def default_speeds(system: System) -> dict[str, int]:
    """The speeds for a baseline: interfaces of default routes that report theirs, in Mb/s."""
    speeds = {name: number(system, f"{BASE}/{name}/speed") or 0 for name in _routed(system)}
    return {name: speed for name, speed in speeds.items() if speed > 0 and _link(system, name)}


def _link(system: System, name: str) -> bool:
    carrier = text(system, f"{BASE}/{name}/carrier")
    return has_link(carrier, text(system, f"{BASE}/{name}/operstate"))


def _down(system: System, name: str) -> Finding:
    state = text(system, f"{BASE}/{name}/operstate") or "unknown"
    carrier = text(system, f"{BASE}/{name}/carrier") or "unreadable"
    return DOWN.found(f"operstate {state}, carrier {carrier}", name)


def _quality(system: System, name: str, wanted: int, uptime: float) -> list[Finding]:
    base = f"{BASE}/{name}"
    found = []
    speed = number(system, f"{base}/speed") or -1  # -1, or unreadable, where there is none
    if 0 < speed < wanted:
        found.append(SLOW.found(f"{speed} Mb/s, expected {wanted} Mb/s", name))
    if text(system, f"{base}/duplex") == "half":
        found.append(HALF.found(f"{base}/duplex is half", name))
    members = text(system, f"{base}/bonding/slaves").split() or [name]
    for member in members:
        if member != name and not _link(system, member):
            found.append(BOND.found(f"{member} has no link", name))
        counters = {
            "crc": number(system, f"{BASE}/{member}/statistics/rx_crc_errors") or 0,
            "packets": number(system, f"{BASE}/{member}/statistics/rx_packets") or 0,
            "downs": number(system, f"{BASE}/{member}/carrier_down_count") or 0,
        }
        found += judge_counters(member, counters, uptime)
    return found


def _recorded(value: Any) -> dict[str, int]:
    """The fleet's record: {"eth0": 25000}."""
    if not isinstance(value, dict):
        return {}
    return {name: speed for name, speed in value.items() if isinstance(speed, int)}


CHECK = Check(
    name="ethernet",
    run=_run,
    conditions=(MISSING, DOWN, SLOW, HALF, BOND, ERRORS, FLAPS, SETTING),
    settings={
        "expected": Setting(
            [],
            'interfaces that must have a link, and their speed in Mb/s: "eth0", "bond0:50000"; '
            "empty: the fleet's record, or the interfaces of the default route",
        ),
    },
    closes_on_error=False,
    cost_ms=1.0,
)
