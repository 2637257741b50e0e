"""The BMC's view of power, cooling and hardware faults: chassis status and event log.

Asked by ipmitool, where it is installed and the kernel has the interface, with commands that are
answered at once: a scan of all sensors takes some BMCs half a minute. Everything here is a WARN.
"""

from __future__ import annotations

import re
import time

from health.check import Check, Condition
from health.finding import Finding
from health.node.sysfs import kind
from health.node.system import System

CHASSIS = Condition(
    "bmc-chassis", "WARN", "node", "none", "the BMC reports a fault of power, cooling or drives"
)
EVENT = Condition(
    "bmc-event", "WARN", "node", "none", "a fault of hardware in the BMC's log, today or yesterday"
)
FULL = Condition("bmc-log-full", "WARN", "node", "none", "the BMC's log is full: events are lost")
UNREAD = Condition("bmc-unread", "WARN", "tool", "none", "the BMC did not answer")

_DEVICES = ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")
_PROGRAMS = ("/usr/bin/ipmitool", "/usr/sbin/ipmitool", "/usr/local/bin/ipmitool")
_COMMAND_S = 1.5
_LAST = "20"  # events that are looked at
_FAULTS = ("Power Overload", "Main Power Fault", "Power Control Fault", "Drive Fault",
           "Cooling/Fan Fault")  # fmt: skip
_EVENT = re.compile(
    r"Uncorrectable (?:machine check|ECC)|IERR|Thermal Trip|Bus (?:Fatal|Uncorrectable) error|"
    r"PCI SERR|Power Supply.*(?:Failure detected|AC lost)|Redundancy Lost|Non-recoverable",
    re.IGNORECASE,
)
_DAY_S = 86_400


def values(said: str) -> dict[str, str]:
    """ "Cooling/Fan Fault    : true" -> {"Cooling/Fan Fault": "true"}. Pure."""
    rows = (line.partition(":") for line in said.splitlines())
    return {name.strip(): value.strip() for name, mark, value in rows if mark}


def events(said: str, now: float) -> list[str]:
    """The lines of `sel list` that tell of a fault, of today and yesterday. Pure.

    The BMC's clock may keep another time zone, and a wrong one says nothing: its date is all that
    is compared, in both forms that ipmitool has printed.
    """
    days = [time.gmtime(now + offset) for offset in (-_DAY_S, 0, _DAY_S / 2)]
    dates = {time.strftime(form, day) for day in days for form in ("%m/%d/%Y", "%m/%d/%y")}
    found = []
    for line in said.splitlines():
        fields = [field.strip() for field in line.split("|")]
        asserted = len(fields) > 4 and fields[1] in dates and "Deasserted" not in fields
        if asserted and _EVENT.search(line):
            found.append(" ".join(" | ".join(fields[1:]).split()))
    return found


def _run(system: System) -> list[Finding]:
    if not any(kind(system, path) == "char" for path in _DEVICES):
        return []
    found: list[Finding] = []
    try:
        chassis = _ask(system, "chassis", "status")
        if chassis is None:
            return []  # not installed
        faults = [name for name in _FAULTS if values(chassis).get(name) == "true"]
        if faults:
            found.append(CHASSIS.found(f"{', '.join(faults)} (ipmitool chassis status)"))
        log = values(_ask(system, "sel", "info") or "")
        if log.get("Overflow") == "true":
            said = (
                f"{log.get('Entries', 'many')} entries, overflow: save it, then ipmitool sel clear"
            )
            found.append(FULL.found(said))
        told = events(_ask(system, "sel", "list", "last", _LAST) or "", system.now())
        if told:
            more = f" and {len(told) - 1} more like it" if len(told) > 1 else ""
            found.append(EVENT.found(f"{told[-1][:160]}{more} (ipmitool sel list)"))
    except TimeoutError:
        found.append(UNREAD.found(f"ipmitool: no answer in {_COMMAND_S:g} s"))
    except OSError as error:
        found.append(UNREAD.found(f"ipmitool: {error.strerror or error}"))
    return found


def _ask(system: System, *words: str) -> str | None:
    """Return ipmitool's output; None where it is not installed. OSError where it failed."""
    for program in _PROGRAMS:
        try:
            code, out, err = system.command([program, *words], _COMMAND_S)
        except FileNotFoundError:
            continue
        if code:
            last = (err.strip() or out.strip() or f"exit code {code}").splitlines()[-1]
            raise OSError(0, f"{' '.join(words)}: {last[:120]}")
        return out
    return None


CHECK = Check(
    name="bmc",
    run=_run,
    conditions=(CHASSIS, EVENT, FULL, UNREAD),
    settings={},
    where=frozenset({"sweep", "deep"}),
    closes_on_error=False,
    deadline_s=8.0,
    cost_ms=100.0,
)
