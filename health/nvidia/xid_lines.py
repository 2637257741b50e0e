"""The lines that NVIDIA's driver writes into the kernel's log. Pure; never raises on any text.

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
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from health.node.system import LogRecord

PREFIXES = ("NVRM: ", "nvidia-nvswitch")
RECOVERY_WORDS = (
    ("none", 0),
    ("gpu reset", 1),
    ("pf flr", 1),
    ("node reboot", 2),
    ("os reboot", 2),
    ("drain p2p", 3),
    ("drain and reset", 4),
    ("recover imex", 5),
    ("bus reset", 6),
    ("system reboot", 7),
)
UNKNOWN_RECOVERY = -1


class DriverMessage(NamedTuple):
    """One message. ``gpu`` is a PCI address, "0000:3b:00.0"; empty for the driver itself."""

    kind: str  # "xid", "sxid", "lost", "driver"
    gpu: str
    code: int  # 0: none
    message: str  # without process and prefix
    unit: str = ""  # "nvswitch3", or the MIG instance "GPU-I:05"


_ADDRESS = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"


# Patterns are compiled at their first use: a healthy node needs none of them.
_XID = (
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?"
    r"([^)]{0,60})\): ?(\d{1,5})(?!\d),? ?"
)
_PROCESS = r"pid=[^,]{0,40}(?:, name=(.{0,120}?))?(?:, |$)"
_SXID = (
    r"nvidia-(nvswitch\d{1,4}): SXid \(PCI:([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):"
    r"([0-9a-fA-F]{2})(?:\.[0-7])?\): ?0{0,4}(\d{1,6})(?!\d),? ?"
)
_OFF_THE_BUS = (
    rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_ADDRESS}"
    r"(?::? (?:GPU )?has fallen off the bus|.{0,200}fallen off the bus and is not responding)"
)
_INIT_FAILED = rf"NVRM: GPU {_ADDRESS}: RmInitAdapter failed!"
_FIRST_OF_THREE = rf"NVRM: The NVIDIA GPU {_ADDRESS}\s*$"
_RECOVERY = (
    r"recovery action changed from (?:0x([0-9a-fA-F]{1,8}) )?\(?([^()]{0,40}?)\)? "
    r"to (?:0x([0-9a-fA-F]{1,8}) )?\(?([^()]{1,40})\)?"
)


def _loading(text: str) -> bool:
    """True if the driver itself reports that it is loading.

    The kernel's messages about a process begin with its name, 15 characters that its user may
    choose: "NVRM: loading N[4711]: segfault at 0" must not look like a new driver.
    """
    return text.startswith("NVRM: loading NVIDIA UNIX ") and "Kernel Module" in text


def address(domain: str, bus: str, device: str) -> str:
    """A PCI address in the form of sysfs; the domain has four digits, or more if it needs them."""
    return f"{int(domain, 16):04x}:{bus}:{device}.0".lower()


def parse(text: str) -> DriverMessage | None:
    """The message in one record of the kernel's log; None when it is none of these."""
    if text.startswith("NVRM: Xid ("):
        match = re.match(_XID, text)
        if not match:
            return None
        domain, bus, device, instance, code = match.groups()
        rest = text[match.end() :]
        process = re.match(_PROCESS, rest)
        message = rest[process.end() :] if process else rest
        return DriverMessage(
            "xid", address(domain, bus, device), int(code), message, instance.strip()
        )
    if text.startswith("nvidia-nvswitch"):
        match = re.match(_SXID, text)
        if not match:
            return None
        unit, domain, bus, device, code = match.groups()
        return DriverMessage(
            "sxid", address(domain, bus, device), int(code), text[match.end() :], unit
        )
    if text.startswith("NVRM: loading "):
        return (
            DriverMessage("driver", "", 0, text[len("NVRM: loading ") :])
            if _loading(text)
            else None
        )
    if "fallen off the bus" in text:
        match = re.match(_OFF_THE_BUS, text, re.DOTALL)
        return DriverMessage("lost", address(*match.groups()), 0, "bus") if match else None
    if "RmInitAdapter failed" in text:
        match = re.match(_INIT_FAILED, text)
        return DriverMessage("lost", address(*match.groups()), 0, "init") if match else None
    return None


def recovery(message: str) -> tuple[int, int] | None:
    """Return what Xid 154 changed the recovery action from and to: numbers of NVML's field.

    The number counts: the words beside it changed between releases ("Node Reboot Required", "OS
    Reboot"). UNKNOWN_RECOVERY where neither is known; None if this is no such message.
    """
    match = re.search(_RECOVERY, message)
    if not match:
        return None
    was, was_word, now, now_word = match.groups()
    return _recovery_number(was, was_word), _recovery_number(now, now_word)


def _recovery_number(digits: str | None, word: str) -> int:
    if digits:
        number = int(digits, 16)
        return number if number <= 7 else UNKNOWN_RECOVERY
    lower = word.lower()
    return next((n for part, n in RECOVERY_WORDS if part in lower), UNKNOWN_RECOVERY)


def caused_by(message: str) -> int:
    """The Xid that a message of 45 names as its cause; 0: none."""
    at = message.rfind("caused by previous Xid ")
    digits = message[at + len("caused by previous Xid ") :].strip(" .") if at >= 0 else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 6 else 0


def lines(records: Iterable[LogRecord]) -> Iterable[tuple[LogRecord, DriverMessage]]:
    """The driver's messages of a log, in its order.

    One old form of "fallen off the bus" is three lines, which some loggers keep apart.
    """
    opened: DriverMessage | None = None
    for record in records:
        text = record.text
        if not text.startswith(PREFIXES):
            continue
        line = parse(text)
        if line is None and text.startswith("NVRM: The NVIDIA GPU "):
            match = re.match(_FIRST_OF_THREE, text)
            opened = DriverMessage("lost", address(*match.groups()), 0, "bus") if match else None
        elif line is None and opened and text.startswith("NVRM: fallen off the bus"):
            line, opened = opened, None
        if line is not None:
            yield record, line
