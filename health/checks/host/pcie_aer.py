"""PCI Express errors (AER) of what jobs use: GPUs, network adapters, NVMe, and the ports above.

Two sources: the counters of the kernel (Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats),
which count since boot, and its log (drivers/pci/pcie/aer.c, dpc.c; firmware-first: cper.c), which
also tells of devices that are gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.kernlog import evidence
from health.node.sysfs import link, names
from health.node.system import LogRecord, System
from robust_slurm.error_counters import AER_KINDS, count_aer, parse_aer

FATAL = Condition("aer-fatal", "FAIL", "node", "reboot", "a fatal error since boot")
MANY = Condition(
    "aer-nonfatal-many", "FAIL", "node", "reboot", "`many` non-fatal errors of a device since boot"
)
NONFATAL = Condition("aer-nonfatal", "WARN", "node", "none", "a non-fatal error since boot")
CORRECTED = Condition(
    "aer-corrected", "WARN", "node", "none", "`corrected` corrected errors per hour, since boot"
)
OTHER = Condition(
    "aer-fatal-other", "WARN", "node", "none", "a fatal error of a device that no job uses"
)

DEVICES = "/sys/bus/pci/devices"
_LINKS = ("/sys/class/infiniband", "/sys/class/nvme", "/sys/class/net")
# Patterns are compiled at their first use.
_ADDRESS = r"[0-9a-f]{4,6}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_BUS_ERROR = (
    rf"[\w.-]+ ({_ADDRESS}): (?:AER: )?(?:"
    r"PCIe Bus Error: severity=(\w+(?: \([\w-]+\))?),|"
    r"(?:Multiple )?(\w+(?: \([\w-]+\))?) error (?:message )?received(?: from|:) "
    rf"({_ADDRESS})|"
    r"(DPC: containment event))"
)
_REPORT = r"\{(\d+)\}\[Hardware Error\]:\s+(event severity|section[ _]type|device_id): ?(\S.*)"


class AerMessage(NamedTuple):
    """One error in the log. ``kind`` as in the names of the counters; ``source`` is who tells it:
    "device", "port" or "firmware", each of which may tell the same error."""

    record: LogRecord
    device: str  # "0000:3b:00.0"
    kind: str
    source: str


class Devices(NamedTuple):
    """Devices of jobs: PCI address -> name ("mlx5_0", "gpu"); ports above them, nearest first."""

    used: Mapping[str, str]
    ports: Mapping[str, str]  # address -> name of what is below
    nearest: frozenset[str]

    def has(self, address: str) -> bool:
        return address in self.used or address in self.ports

    def called(self, address: str) -> str:
        """The name in a finding."""
        name = self.used.get(address, "gpu")
        return address if name == "gpu" else name


def _is_address(text: str) -> bool:
    return re.fullmatch(_ADDRESS, text) is not None


def kind_of(severity: str) -> str:
    """ "Uncorrected (Non-Fatal)" and its like as the name of a counter; "" if unknown."""
    lower = severity.lower()
    if lower.startswith("correct"):
        return "correctable"
    if "non-fatal" in lower or lower.startswith("recoverable"):
        return "nonfatal"
    return "fatal" if "fatal" in lower else ""


def messages(records: Iterable[LogRecord]) -> list[AerMessage]:
    """The errors that a log tells of, one for each message of a device or about it."""
    out = []
    reports: dict[str, list[str]] = {}
    for record in records:
        text = record.text
        if "AER: " in text or "PCIe Bus Error" in text or "DPC: " in text:
            match = re.match(_BUS_ERROR, text)
            if not match:
                continue
            port, severity, received, about, contained = match.groups()
            kind = "fatal" if contained else kind_of(severity or received)
            source = "port" if about or contained else "device"
            if kind:
                out.append(AerMessage(record, about or port, kind, source))
        elif "[Hardware Error]" in text:
            match = re.match(_REPORT, text)
            if not match:
                continue
            number, key, value = match.groups()
            known = reports.setdefault(number, ["", ""])
            if key == "event severity":
                known[0] = kind_of(value)
            elif key != "device_id":
                known[1] = value
            elif known[1].startswith("PCIe") and known[0] and _is_address(value.strip()):
                out.append(AerMessage(record, value.strip(), known[0], "firmware"))
    return out


def devices(system: System) -> Devices:
    """Find the devices that jobs use on this node, and the ports above them."""
    used: dict[str, str] = {}
    for address in names(system, "/proc/driver/nvidia/gpus"):
        if _is_address(address):
            used[address] = "gpu"
    for place in _LINKS:
        for name in names(system, place):
            target = link(system, f"{place}/{name}/device").rpartition("/")[2]
            if _is_address(target):
                used.setdefault(target, name)
    ports: dict[str, str] = {}
    nearest = set()
    for address, name in used.items():
        above = [p for p in link(system, f"{DEVICES}/{address}").split("/") if _is_address(p)]
        nearest.update(above[-2:-1])
        for port in above[:-1]:
            ports.setdefault(port, f"gpu {address}" if name == "gpu" else name)
    return Devices(used, ports, frozenset(nearest))


def counters(system: System, address: str) -> dict[str, int]:
    """Errors of a device since boot by kind; a kind that it does not count is missing."""
    out = {}
    for kind in AER_KINDS:
        try:
            text = system.read(f"{DEVICES}/{address}/aer_dev_{kind}")
        except OSError:
            continue
        out[kind] = count_aer(parse_aer(text))
    return out


def judge(
    known: Devices,
    counted: Mapping[str, Mapping[str, int]],
    told: Sequence[AerMessage],
    gone: frozenset[str],
    uptime: float,
    corrected: float,
    many: int,
) -> list[Finding]:
    """``gone``: devices of the log that the kernel has no more; limits as in the settings."""
    out = []
    for address in sorted({*counted, *(message.device for message in told)}):
        mine = [message for message in told if message.device == address]
        seen = counted.get(address, {})
        device = known.called(address)
        (fatal, why), (nonfatal, soft_why), (soft, rate_why) = (
            _errors(kind, mine, seen, uptime) for kind in AER_KINDS
        )
        below = f"; the port above {known.ports[address]}" if address in known.ports else ""
        if fatal:
            condition = FATAL if known.has(address) or address in gone else OTHER
            out.append(condition.found(why + below, device))
        if not known.has(address):
            continue
        if nonfatal:
            condition = MANY if nonfatal >= many else NONFATAL
            limit = f"limit {many}: " if condition is MANY else ""
            out.append(condition.found(limit + soft_why + below, device))
        rate = soft / max(1.0, uptime / 3600.0)
        if rate >= corrected:
            text = f"{rate:.0f} per hour, limit {corrected:g}: {rate_why}{below}"
            out.append(CORRECTED.found(text, device))
    return out


def _errors(
    kind: str, told: Iterable[AerMessage], counted: Mapping[str, int], uptime: float
) -> tuple[int, str]:
    """The number of a device's errors of one kind, and the evidence."""
    sources: dict[str, list[LogRecord]] = {}
    for message in told:
        if message.kind == kind:
            sources.setdefault(message.source, []).append(message.record)
    times = max([counted.get(kind, 0), *(len(records) for records in sources.values())])
    if not sources:
        return times, f"{times} x since boot (aer_dev_{kind})"
    return times, evidence(max(sources.values(), key=len), uptime, times)


def run(system: System) -> list[Finding]:
    told = messages(system.kernel_log())
    known = devices(system)
    counted = {address: counters(system, address) for address in {*known.used, *known.nearest}}
    if not told and not any(n for numbers in counted.values() for n in numbers.values()):
        return []
    options = system.options("pcie_aer")
    limits = (options["corrected"], options["many"])
    strange = {m.device for m in told if not known.has(m.device)}
    gone = frozenset(address for address in strange if _gone(system, address))
    return judge(known, counted, told, gone, system.uptime(), *limits)


def _gone(system: System, address: str) -> bool:
    try:
        system.entry(f"{DEVICES}/{address}")
    except FileNotFoundError:
        return True
    return False


CHECK = Check(
    name="pcie_aer",
    run=run,
    conditions=(FATAL, MANY, NONFATAL, CORRECTED, OTHER),
    settings={
        "corrected": Setting(
            100.0, "corrected errors per hour of a device that raise a warning", "1/h"
        ),
        "many": Setting(100, "non-fatal errors of a device since boot that close the gate"),
    },
    cost_ms=3.0,
)
