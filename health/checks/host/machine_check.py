"""Machine checks: errors of processors and memory in the kernel's log.

Forms: the kernel's own (arch/x86/kernel/cpu/mce/core.c), AMD's decoder (drivers/edac/mce_amd.c),
firmware-first reports (drivers/acpi/apei/ghes.c, drivers/firmware/efi/cper.c), EDAC
(drivers/edac/edac_mc.c), and what became of poisoned pages (mm/memory-failure.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.kernlog import evidence, within
from health.node.system import LogRecord, System

UNCORRECTED = Condition(
    "mce-uncorrected", "FAIL", "node", "reboot", "an error since boot that was not corrected"
)
STORM = Condition(
    "mce-corrected-storm", "FAIL", "node", "service", "`storm` corrected errors in an hour"
)
CORRECTED = Condition(
    "mce-corrected", "WARN", "node", "none", "`corrected` corrected errors in an hour"
)
PREVIOUS = Condition(
    "mce-previous-boot", "WARN", "node", "none", "an error that ended the previous boot"
)

# Patterns are compiled at their first use: a healthy node needs none of them.
_BANK = (
    r"(?:mce: )?\[Hardware Error\]: CPU:? ?\d+"
    r"(?:: Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: | \([0-9a-f:]+\) MC\d+_STATUS\S*"
    r"\]: 0x)([0-9a-f]{16})"
)
# A process may be called "EDAC MC0: 1 UE ": of its kind of message the next word is "[4711]:".
_EDAC = r"EDAC MC\d{1,4}: (\d{1,6}) (CE|UE) (?:[^\[]* )?on "
_FIRMWARE = r"(\{\d+\})?\[Hardware Error\]:\s+(event severity|section[ _]type): ?(\w.*)"
_PAGE = r"Memory failure: 0x[0-9a-f]+: .*due to hardware memory corruption"
BOOT_S = 30.0  # what the banks still held from before is logged while the processors come up
_UC = 1 << 61  # MCi_STATUS: not corrected (Intel SDM 3B, 17.3.2.2; AMD APM 2, 9.3.2.1)


class Error(NamedTuple):
    """``source``: "mce", "edac", "firmware", "page"; one error is often told by several."""

    record: LogRecord
    source: str
    kind: str  # "corrected", "uncorrected", "previous"
    times: int = 1


def errors(records: Iterable[LogRecord]) -> list[Error]:
    """The errors that a log tells of; those of PCIe are left to the family pcie_aer."""
    out = []
    reports: dict[str, tuple[LogRecord, str]] = {}
    for record in records:
        text = record.text
        if "[Hardware Error]" in text:
            match = re.match(_BANK, text)
            if match:
                hard = "uncorrected" if record.time >= BOOT_S else "previous"
                kind = hard if int(match[1], 16) & _UC else "corrected"
                out.append(Error(record, "mce", kind))
                continue
            found = re.match(_FIRMWARE, text)
            if found:
                number, key, value = found.groups()
                if key == "event severity":
                    reports[number or ""] = (record, value)
                elif (number or "") in reports:
                    first, severity = reports.pop(number or "")
                    if not (number and value.startswith("PCIe")):
                        out.append(_report(first, number, severity))
        elif text.startswith("EDAC MC"):
            match = re.match(_EDAC, text)
            if match:
                kind = "uncorrected" if match[2] == "UE" else "corrected"
                out.append(Error(record, "edac", kind, int(match[1])))
        elif re.match(_PAGE, text):
            out.append(Error(record, "page", "uncorrected"))
    return out


def _report(record: LogRecord, number: str | None, severity: str) -> Error:
    """A report of the firmware; without a number it is one of the previous boot (BERT)."""
    if severity.startswith(("corrected", "info")):
        return Error(record, "firmware", "corrected")
    return Error(record, "firmware", "uncorrected" if number else "previous")


def judge(found: Sequence[Error], uptime: float, corrected: int, storm: int) -> list[Finding]:
    """Limits are errors in an hour."""
    out = []
    for condition, kind in ((UNCORRECTED, "uncorrected"), (PREVIOUS, "previous")):
        records = [error.record for error in found if error.kind == kind]
        if records:
            out.append(condition.found(evidence(records, uptime)))
    recent = set(within([error.record for error in found], uptime, 3600.0))
    soft = [error for error in found if error.kind == "corrected" and error.record in recent]
    counts: dict[str, int] = {}
    for error in soft:
        counts[error.source] = counts.get(error.source, 0) + error.times
    most = max(counts.values(), default=0)  # not the sum: each error has several messages
    if most >= min(corrected, storm):
        limit = storm if most >= storm else corrected
        text = evidence([error.record for error in soft], uptime, most)
        told = f"in an hour, limit {limit}: {text}"
        out.append((STORM if most >= storm else CORRECTED).found(told))
    return out


def run(system: System) -> list[Finding]:
    found = errors(system.kernel_log())
    if not found:
        return []
    options = system.options("machine_check")
    return judge(found, system.uptime(), options["corrected"], options["storm"])


CHECK = Check(
    name="machine_check",
    run=run,
    conditions=(UNCORRECTED, STORM, CORRECTED, PREVIOUS),
    settings={
        "corrected": Setting(10, "corrected errors per hour that raise a warning", "errors"),
        "storm": Setting(1000, "corrected errors per hour that close the gate", "errors"),
    },
    cost_ms=1.0,
)
