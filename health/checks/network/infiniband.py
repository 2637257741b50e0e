"""InfiniBand and RoCE: the ports that should be up are, at their full rate, and without errors.

The site (`expected`), else the fleet's record, says which ports should be up. Without either, a
port that is down makes a FAIL only if it was up since boot: a port without a cable, down on the
whole fleet, never was. Counters are since boot and only make a WARN: one bad hour last week would
keep the node out until it is booted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.ibports import Port, ports
from health.node.sysfs import fleet
from health.node.system import System
from robust_slurm.error_counters import RETRY_COUNTERS
from robust_slurm.hostlist import expand

MISSING = Condition("ib-missing", "FAIL", "node", "reboot", "an expected port is missing")
DOWN = Condition(
    "ib-down",
    "FAIL",
    "node",
    "none",
    "an expected port, or one that was up since boot, has no physical link",
)
UNEXPECTED = Condition(
    "ib-down-unexpected",
    "WARN",
    "node",
    "none",
    "a port never came up since boot, and most of its kind (or none at all) are up",
)
NOT_ACTIVE = Condition(
    "ib-not-active",
    "FAIL",
    "node",
    "none",
    "an expected port has a link, but no subnet manager activated it (INIT, ARMED); WARN if no "
    "list names the port",
)
RATE = Condition(
    "ib-rate",
    "FAIL",
    "node",
    "none",
    "slower than expected, or one lane where similar ports have more; WARN if only slower than "
    "similar ports",
)
ERRORS = Condition("ib-errors", "WARN", "node", "none", "errors of the link, per hour since boot")
FLAPS = Condition("ib-flaps", "WARN", "node", "none", "the link went down often since boot")
RETRIES = Condition(
    "ib-retransmits", "WARN", "node", "none", "retransmissions, per hour since boot"
)
FIRMWARE = Condition(
    "ib-firmware",
    "WARN",
    "node",
    "none",
    "firmware differs from the fleet's record, or from that of the same board model in this node",
)
SETTING = Condition("ib-setting", "WARN", "tool", "none", "an entry of `expected` cannot be used")

HOUR, DAY = 3600, 86_400
# Per hour since boot. 120 symbol errors an hour: a bit error rate of 1e-12, the most that the IBTA
# specification allows; for HDR and later the counter holds what error correction left over. The
# others: ten, where ibqueryerrors begins to report (error_thresholds of infiniband-diags).
ERROR_LIMITS: Mapping[str, float] = {
    "symbol_error": 120,
    "link_error_recovery": 10,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
}
LEAST = 10  # fewer since boot are never reported
DOWNS_PER_DAY = 5


class PortRequirements(NamedTuple):
    """Requirements on a port. ``rate`` 0: any; ``firmware`` empty: any. ``source``: the origin."""

    rate: float = 0.0
    firmware: tuple[str, ...] = ()
    source: str = ""


def parse_expected(entries: Sequence[str]) -> dict[str, PortRequirements]:
    """["mlx5_[0-7]:400", "mlx5_9/2"] -> port -> wanted. ValueError says what is wrong."""
    out: dict[str, PortRequirements] = {}
    for entry in entries:
        name, colon, rate = entry.rpartition(":")
        if not colon:
            name, rate = entry, "0"
        try:
            gbits = float(rate)
        except ValueError:
            raise ValueError(f"{entry!r}: use PORT or PORT:GBITS") from None
        for port in expand(name):
            out[port.removesuffix("/1")] = PortRequirements(gbits, (), "infiniband.expected")
    return out


def from_fleet(record: Any) -> dict[str, PortRequirements]:
    """{"mlx5_0": {"rate": 400, "firmware": ["28.39.1002"]}}; what does not fit is left out."""
    out: dict[str, PortRequirements] = {}
    for name, value in record.items() if isinstance(record, dict) else ():
        if isinstance(value, dict):
            rate, firmware = value.get("rate", 0), value.get("firmware", [])
            out[str(name).removesuffix("/1")] = PortRequirements(
                float(rate) if isinstance(rate, int | float) else 0.0,
                tuple(str(word) for word in firmware) if isinstance(firmware, list) else (),
                "the fleet's record",
            )
    return out


def judge(
    found: Sequence[Port], wanted: Mapping[str, PortRequirements], uptime: float
) -> list[Finding]:
    """All findings about the ports of a node."""
    here = {port.name: port for port in found}
    out = [
        MISSING.found(f"not in /sys/class/infiniband, {want.source} lists it", name)
        for name, want in wanted.items()
        if name not in here
    ]
    for port in found:
        alike = [p for p in found if (p.board, p.link) == (port.board, port.link)]
        want = wanted.get(port.name)
        if not port.active:
            out += judge_down(port, want, alike, bool(wanted))
            continue
        out += judge_rate(port, want, alike)
        out += judge_counters(port, uptime)
        out += judge_firmware(port, want, alike)
    enabled = [port for port in found if port.physical != "Disabled"]
    if enabled and not (wanted or out or any(port.active for port in found)):
        out.append(UNEXPECTED.found(f"none of {len(found)} ports is active"))
    return out


def judge_down(
    port: Port, want: PortRequirements | None, alike: Sequence[Port], others_wanted: bool
) -> list[Finding]:
    """Judge a port that is not ACTIVE; with a list of expected ports, others are ignored."""
    said = f"state {port.state}, physical {port.physical}"
    if want is None and (others_wanted or port.physical == "Disabled"):
        return []
    reason = f"{want.source} requires it up" if want else ""
    if port.physical == "LinkUp":
        if want:
            return [NOT_ACTIVE.found(f"{said}: no subnet manager? {reason}", port.name)]
        return [NOT_ACTIVE.found(f"{said}: no subnet manager?", port.name, status="WARN")]
    if want:
        return [DOWN.found(f"{said}, {reason}", port.name)]
    if port.was_used:
        return [DOWN.found(f"{said}, and it was up since boot", port.name)]
    up = sum(p.active for p in alike)
    if up > len(alike) - up:
        return [UNEXPECTED.found(f"{said}; {up} of {len(alike)} of its kind are up", port.name)]
    return []


def judge_rate(port: Port, want: PortRequirements | None, alike: Sequence[Port]) -> list[Finding]:
    if not port.rate:
        return []
    said = f"{port.rate:g} Gb/s" + (f" ({port.width}X)" if port.width else "")
    if want and want.rate:
        if port.rate < want.rate:
            return [RATE.found(f"{said}, {want.source} says {want.rate:g}", port.name)]
        return []
    rates = Counter(p.rate for p in alike if p.active)
    most, count = rates.most_common(1)[0]
    if port.rate >= most or 2 * count <= rates.total():
        return []
    said = f"{said}, {count} of {rates.total()} of its kind have {most:g}"
    # An InfiniBand link falls back to one lane when its cable is damaged; no one buys it so.
    one_lane = port.link == "InfiniBand" and port.width == 1
    return [RATE.found(said, port.name, status=None if one_lane else "WARN")]


def judge_counters(port: Port, uptime: float) -> list[Finding]:
    hours = max(uptime, HOUR) / HOUR
    out = []
    grown = []
    for name, limit in ERROR_LIMITS.items():
        count = port.counters.get(name, 0)
        if count > LEAST and count / hours > limit:
            grown.append(f"{name} {count} ({count / hours:.0f} an hour, limit {limit:g})")
    if grown:
        out.append(ERRORS.found(", ".join(grown), port.name))
    downs = port.counters.get("link_downed", 0)
    rate = downs * DAY / max(uptime, DAY)
    if rate > DOWNS_PER_DAY:
        said = f"link_downed {downs}, {rate:.1f} a day, limit {DOWNS_PER_DAY}"
        out.append(FLAPS.found(said, port.name))
    return out


def judge_retries(port: Port, uptime: float, limit: float) -> list[Finding]:
    hours = max(uptime, HOUR) / HOUR
    grown = [
        f"{name} {count} ({count / hours:.0f} an hour, limit {limit:g})"
        for name in RETRY_COUNTERS
        if (count := port.counters.get(name, 0)) / hours > limit
    ]
    return [RETRIES.found(", ".join(grown), port.name)] if grown else []


def judge_firmware(
    port: Port, want: PortRequirements | None, alike: Sequence[Port]
) -> list[Finding]:
    if want and want.firmware:
        if port.firmware in want.firmware:
            return []
        said = f"{port.firmware}, the fleet's record says {' or '.join(want.firmware)}"
        return [FIRMWARE.found(said, port.name)]
    most, count = Counter(p.firmware for p in alike).most_common(1)[0]
    if port.firmware == most or 2 * count <= len(alike):
        return []
    said = f"{port.firmware}, {count} of {len(alike)} of board {port.board} have {most}"
    return [FIRMWARE.found(said, port.name)]


def _run(system: System) -> list[Finding]:
    options = system.options("infiniband")
    out: list[Finding] = []
    wanted: dict[str, PortRequirements] = {}
    recorded = from_fleet(fleet(system).get("infiniband"))
    try:
        wanted = parse_expected(options["expected"])
    except ValueError as error:
        out.append(SETTING.found(f"infiniband.expected: {error}"))
    for name, want in recorded.items() if wanted else ():
        if name in wanted:  # the setting says which ports; the record adds what it does not say
            own = wanted[name]
            wanted[name] = own._replace(rate=own.rate or want.rate, firmware=want.firmware)
    found = ports(system)
    uptime = system.uptime()
    out += judge(found, wanted or recorded, uptime)
    limit = float(options["retransmits_per_hour"])
    for port in found:
        out += judge_retries(port, uptime, limit)
    return out


CHECK = Check(
    name="infiniband",
    run=_run,
    conditions=(
        MISSING,
        DOWN,
        UNEXPECTED,
        NOT_ACTIVE,
        RATE,
        ERRORS,
        FLAPS,
        RETRIES,
        FIRMWARE,
        SETTING,
    ),
    settings={
        "expected": Setting(
            [],
            'ports that must be active, and their rate in Gb/s: "mlx5_[0-7]:400", "mlx5_8/2"; '
            "others are then left alone; empty: the fleet's record, or what the node itself shows",
        ),
        "retransmits_per_hour": Setting(
            3600.0,
            "local_ack_timeout_err, packet_seq_err, out_of_sequence and rnr_nak_retry_err, each, "
            "since boot",
            "an hour",
        ),
    },
    deadline_s=3.0,
    cost_ms=4.0,
)
