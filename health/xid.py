"""What NVIDIA's driver wrote into the kernel's log, as events. Pure; never raises on any text.

The forms are those of the driver's own source (open-gpu-kernel-modules: kernel_rc.c, gpu.c,
osinit.c, osapi.c, common_nvswitch.h) and of older releases' messages as they are found in public:

    NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:01): 94, pid='<unknown>', name=<unknown>, Contained …
    NVRM: Xid (0000:3b:00): 31, Ch 0000000b, engmask 00000120
    NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (…)
    nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress …
    NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
    NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:2477)
    NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05 …

A reset of a GPU leaves no line of its own in the log; see state.py for how one is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from health.system import Event, LogRecord

# Messages with no more than this much silence between them are one incident: NVIDIA's own
# definition of a burst of Xids (docs.nvidia.com/fleet-intel/user-guide/xid-bursts).
BURST_S = 180.0
TEXT_LIMIT = 240  # characters of a message that an event keeps

PREFIXES = ("NVRM: ", "nvidia-nvswitch")
KINDS = frozenset({"xid", "sxid", "lost", "driver"})
RECOVERY_WORDS = (
    ("none", 0),
    ("gpu reset", 1),
    ("pf flr", 1),
    ("node reboot", 2),
    ("os reboot", 2),
    ("drain p2p", 3),
    ("drain and reset", 4),
    ("recover imex", 5),
)
UNKNOWN_RECOVERY = -1


class Line(NamedTuple):
    """One message. ``gpu`` is a PCI address, "0000:3b:00.0"; empty for the driver itself."""

    kind: str  # "xid", "sxid", "lost", "driver"
    gpu: str
    code: int  # 0: none
    message: str  # without process and prefix
    unit: str = ""  # "nvswitch3", or the MIG instance "GPU-I:05"


@cache
def _xid() -> re.Pattern[str]:
    return re.compile(
        r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"
        r"([^)]{0,60})\): ?(\d{1,5})(?!\d),? ?"
    )


@cache
def _process() -> re.Pattern[str]:
    return re.compile(r"pid=[^,]{0,40}(?:, name=(.{0,120}?))?(?:, |$)")


@cache
def _sxid() -> re.Pattern[str]:
    return re.compile(
        r"nvidia-(nvswitch\d{1,4}): SXid \(PCI:([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):"
        r"([0-9a-fA-F]{2})(?:\.[0-7])?\): ?0{0,4}(\d{1,6})(?!\d),? ?"
    )


@cache
def _off_the_bus() -> re.Pattern[str]:
    address = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"
    return re.compile(
        rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{address}"
        r"(?::? (?:GPU )?has fallen off the bus|.{0,200}fallen off the bus and is not responding)",
        re.DOTALL,
    )


@cache
def _init_failed() -> re.Pattern[str]:
    address = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"
    return re.compile(rf"NVRM: GPU {address}: RmInitAdapter failed!")


@cache
def _first_of_three() -> re.Pattern[str]:
    address = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"
    return re.compile(rf"NVRM: The NVIDIA GPU {address}\s*$")


@cache
def _recovery() -> re.Pattern[str]:
    return re.compile(
        r"recovery action changed from (?:0x([0-9a-fA-F]{1,8}) )?\(?([^()]{0,40}?)\)? "
        r"to (?:0x([0-9a-fA-F]{1,8}) )?\(?([^()]{1,40})\)?"
    )


def _loading(text: str) -> bool:
    """Whether the driver itself says so.

    The kernel's messages about a process begin with its name, 15 characters that its user may
    choose: "NVRM: loading N[4711]: segfault at 0" must not look like a new driver.
    """
    return text.startswith("NVRM: loading NVIDIA UNIX ") and "Kernel Module" in text


def address(domain: str, bus: str, device: str) -> str:
    """A PCI address in the form of sysfs; the domain has four digits, or more if it needs them."""
    return f"{int(domain, 16):04x}:{bus}:{device}.0".lower()


def parse(text: str) -> Line | None:
    """The message in one record of the kernel's log; None when it is none of these."""
    if text.startswith("NVRM: Xid ("):
        match = _xid().match(text)
        if not match:
            return None
        domain, bus, device, instance, code = match.groups()
        rest = text[match.end() :]
        process = _process().match(rest)
        message = rest[process.end() :] if process else rest
        return Line("xid", address(domain, bus, device), int(code), message, instance.strip())
    if text.startswith("nvidia-nvswitch"):
        match = _sxid().match(text)
        if not match:
            return None
        unit, domain, bus, device, code = match.groups()
        return Line("sxid", address(domain, bus, device), int(code), text[match.end() :], unit)
    if text.startswith("NVRM: loading "):
        return Line("driver", "", 0, text[len("NVRM: loading ") :]) if _loading(text) else None
    if "fallen off the bus" in text:
        match = _off_the_bus().match(text)
        return Line("lost", address(*match.groups()), 0, "bus") if match else None
    if "RmInitAdapter failed" in text:
        match = _init_failed().match(text)
        return Line("lost", address(*match.groups()), 0, "init") if match else None
    return None


def recovery(message: str) -> tuple[int, int] | None:
    """From and to what Xid 154 changed the recovery action: numbers of NVML's field.

    The number counts: the words beside it changed between releases ("Node Reboot Required", "OS
    Reboot"). UNKNOWN_RECOVERY where neither is known; None if this is no such message.
    """
    match = _recovery().search(message)
    if not match:
        return None
    was, was_word, now, now_word = match.groups()
    return _recovery_number(was, was_word), _recovery_number(now, now_word)


def _recovery_number(digits: str | None, word: str) -> int:
    if digits:
        number = int(digits, 16)
        return number if number <= 5 else UNKNOWN_RECOVERY
    lower = word.lower()
    return next((n for part, n in RECOVERY_WORDS if part in lower), UNKNOWN_RECOVERY)


def caused_by(message: str) -> int:
    """The Xid that a message of 45 names as its cause; 0: none."""
    at = message.rfind("caused by previous Xid ")
    digits = message[at + len("caused by previous Xid ") :].strip(" .") if at >= 0 else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 6 else 0


def lines(records: Iterable[LogRecord]) -> Iterable[tuple[LogRecord, Line]]:
    """The driver's messages of a log, in its order.

    One old form of "fallen off the bus" is three lines, which some loggers keep apart.
    """
    opened: Line | None = None
    for record in records:
        text = record.text
        if not text.startswith(PREFIXES):
            continue
        line = parse(text)
        if line is None and text.startswith("NVRM: The NVIDIA GPU "):
            match = _first_of_three().match(text)
            opened = Line("lost", address(*match.groups()), 0, "bus") if match else None
        elif line is None and opened and text.startswith("NVRM: fallen off the bus"):
            line, opened = opened, None
        if line is not None:
            yield record, line


def events_from_log(
    records: Sequence[LogRecord], boot: str, now: float, uptime: float
) -> list[Event]:
    """The driver's messages as events, oldest first; equal ones of one incident are one event.

    ``data``: gpu, code, ``at`` and ``last`` (first and last, seconds since boot), count, text;
    "unit" (nvswitch3, GPU-I:05) and "form" ("bus", "init") where there is one. ``now`` and
    ``uptime`` are of the same moment.
    """
    open_now: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    found: list[tuple[str, dict[str, Any]]] = []
    for record, line in lines(records):
        if line.kind == "driver":
            open_now.clear()  # what is said after that is said by another driver
        detail = _same(line)
        if detail is None:
            continue
        key = (line.kind, line.gpu, line.code, detail)
        data = open_now.get(key)
        if data is not None and record.time - data["last"] <= BURST_S:
            data["last"] = max(record.time, data["last"])
            data["count"] += 1
            continue
        data = {"gpu": line.gpu, "code": line.code, "at": record.time, "last": record.time}
        data |= {"count": 1, "text": record.text[:TEXT_LIMIT]}
        if line.unit:
            data["unit"] = line.unit
        if line.kind == "lost":
            data["form"] = line.message
        open_now[key] = data
        found.append((line.kind, data))
    booted = now - uptime
    return [Event(booted + data["at"], kind, boot, data) for kind, data in found]


def _same(line: Line) -> str | None:
    """What tells two messages of one code apart; None: only a continuation of another message."""
    if line.kind == "sxid":
        word = line.message[:9].lower()
        if word.startswith(("fatal", "non-fatal", "correctab")):
            return word
        return None  # "Severity 1 Engine instance …" and "Data {…}" follow the message itself
    if line.kind == "lost":
        return line.message
    if line.kind == "xid" and line.code == 154:
        return str(recovery(line.message))
    if line.kind == "xid" and line.code == 45:
        return str(bool(caused_by(line.message)))
    if line.kind == "xid" and (line.code == 74 or 144 <= line.code <= 150):
        return _same_link(line)
    return ""


def _same_link(line: Line) -> str:
    from health import nvlink5  # not needed on a healthy node

    if line.code == 74:
        link4 = nvlink5.read74(line.message)
        return f"{link4.link} {link4.reset}" if link4 else ""
    link5 = nvlink5.read(line.code, line.message)
    return f"{link5.unit} {link5.link} {link5.reset}" if link5 else ""


def number(event: Event, key: str) -> float:
    """A number of the event's data; 0 for anything else that may stand in a file."""
    value = event.data.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if abs(value) < 1e15 else 0  # also false for nan


def word(event: Event, key: str) -> str:
    """A string of the event's data; empty for anything else."""
    value = event.data.get(key, "")
    return value if isinstance(value, str) else ""


def end(event: Event) -> float:
    """Wall clock of the last message of an event."""
    return event.time + max(0.0, number(event, "last") - number(event, "at"))


def _key(event: Event) -> tuple[str, str, str, float, str]:
    place = word(event, "gpu")
    line = parse(word(event, "text"))
    same = (_same(line) or "") if line else ""
    return event.boot, event.kind, place, number(event, "code"), same


def fresh(history: Iterable[Event], events: Iterable[Event]) -> list[Event]:
    """The events of a log that the history does not hold yet: what is to be written to it.

    The same incident read again, even where its beginning has left the kernel's buffer meanwhile,
    is not fresh.
    """
    known: dict[tuple[str, str, str, float, str], list[tuple[float, float]]] = {}
    for event in history:
        if event.kind in KINDS:
            span = (number(event, "at"), max(number(event, "last"), number(event, "at")))
            known.setdefault(_key(event), []).append(span)
    out = []
    for event in events:
        first, last = number(event, "at"), number(event, "last")
        spans = known.setdefault(_key(event), [])
        if not any(first - BURST_S <= b and a <= last + BURST_S for a, b in spans):
            out.append(event)
        spans.append((first, last))
    return out


def merge(history: Iterable[Event], events: Iterable[Event]) -> list[Event]:
    """History and log together, every incident once, oldest first.

    Where both tell the same incident, the one with more messages stays.
    """
    old, new = list(history), list(events)
    added = fresh(old, new)
    ids = {id(event) for event in added}
    again = [event for event in new if id(event) not in ids]
    if again:
        counts: dict[tuple[str, str, str, float, str], list[Event]] = {}
        for event in again:
            counts.setdefault(_key(event), []).append(event)
        old = [_fuller(event, counts) for event in old]
    return sorted([*old, *added], key=lambda event: event.time)


def _fuller(event: Event, again: dict[tuple[str, str, str, float, str], list[Event]]) -> Event:
    """The event with what a later look at the same incident added to it."""
    if event.kind not in KINDS:
        return event
    first, last = number(event, "at"), number(event, "last")
    for other in again.get(_key(event), ()):
        begin, finish = number(other, "at"), number(other, "last")
        if begin - BURST_S <= last and first <= finish + BURST_S:
            more = {"last": max(last, finish)}
            more["count"] = max(number(event, "count"), number(other, "count"))
            event = event._replace(data={**event.data, **more})
            last = more["last"]
    return event
