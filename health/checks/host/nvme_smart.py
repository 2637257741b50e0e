"""NVMe drives' reports on themselves: the SMART / health log (NVM Express Base 2.0, 5.16.1.3).

Read by nvme-cli or smartctl, whichever is there, in a process that ends at its deadline. Only
controllers in the kernel's state "live" are asked: a dying one may delay its answer for a minute.
Everything here is a WARN: the disk family closes the gate for a drive that no longer works.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.sysfs import names, text
from health.node.system import System

WARNING = Condition(
    "nvme-warning", "WARN", "node", "none", "the drive sets a critical warning in its health log"
)
WORN = Condition(
    "nvme-worn", "WARN", "node", "none", "the drive has used up `used` % of its rated writes"
)
MEDIA = Condition(
    "nvme-media-errors", "WARN", "node", "none", "more than `media_errors` data integrity errors"
)
UNREAD = Condition(
    "nvme-smart-unread", "WARN", "tool", "none", "the drive's health log could not be read"
)

# Bits of Critical Warning.
BITS = (
    "available spare below its threshold",
    "temperature outside its thresholds",
    "reliability degraded by media or internal errors",
    "media in read-only mode",
    "backup of volatile memory failed",
    "persistent memory region read-only or unreliable",
)
_PLACES = ("/usr/sbin", "/usr/bin", "/sbin", "/usr/local/sbin")
_COMMAND_S = 1.0
_ALL_S = 3.0  # for all drives: a family that overruns its deadline is a FAIL
_BASE = "/sys/class/nvme"
_CONTROLLER = re.compile(r"nvme\d{1,4}", re.ASCII)
_SMARTCTL_LOG = "nvme_smart_health_information_log"


class Health(NamedTuple):
    """``used``: percent of the rated writes; ``spare``: percent left. None: not told."""

    warning: int | None
    used: int | None
    media_errors: int | None
    spare: int | None


def parse(said: str) -> Health:
    """The health log as nvme-cli or smartctl prints it in JSON. ValueError if it is none. Pure."""
    try:
        found = json.loads(said)
    except RecursionError:
        raise ValueError("brackets without end") from None
    log = found.get(_SMARTCTL_LOG, found) if isinstance(found, dict) else None
    if not isinstance(log, dict):
        raise ValueError("not a JSON object")
    warning = log.get("critical_warning")
    if isinstance(warning, dict):  # nvme-cli 2 with verbose output
        warning = warning.get("value")
    health = Health(
        _number(warning),
        _number(log.get("percentage_used", log.get("percent_used"))),
        _number(log.get("media_errors")),
        _number(log.get("available_spare", log.get("avail_spare"))),
    )
    if health.warning is None:
        raise ValueError("no critical_warning in it")
    return health


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 40:
        return int(value)  # nvme-cli prints counters of 128 bits as texts
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 128
    return int(value) if ok else None


def judge(name: str, health: Health, options: Mapping[str, Any]) -> list[Finding]:
    """Findings from one drive's log. Pure."""
    found = []
    told = [bit for number, bit in enumerate(BITS) if (health.warning or 0) >> number & 1]
    if health.warning:
        spare = f"; spare {health.spare} %" if health.spare is not None else ""
        said = f"critical warning 0x{health.warning:02x}: {', '.join(told) or 'reserved bits'}"
        found.append(WARNING.found(f"{said}{spare}", name))
    if health.used is not None and health.used >= options["used"]:
        said = f"{health.used} % of the rated writes are used, limit {options['used']} %"
        found.append(WORN.found(said, name))
    if health.media_errors is not None and health.media_errors > options["media_errors"]:
        said = f"{health.media_errors} media and data integrity errors, limit "
        found.append(MEDIA.found(f"{said}{options['media_errors']}", name))
    return found


def _run(system: System) -> list[Finding]:
    options = system.options("nvme_smart")
    found: list[Finding] = []
    until = time.monotonic() + _ALL_S
    for name in names(system, _BASE):
        here = f"{_BASE}/{name}"
        live = text(system, f"{here}/state") == "live"
        if not (_CONTROLLER.fullmatch(name) and live):
            continue
        if text(system, f"{here}/transport") not in ("pcie", ""):
            continue  # over a network: not this node's hardware
        if time.monotonic() >= until:
            return [*found, UNREAD.found(f"not read: other drives took all {_ALL_S:g} s", name)]
        try:
            said = _ask(system, f"/dev/{name}")
            if said is None:
                return []  # neither program is installed
            found += judge(name, parse(said), options)
        except TimeoutError:
            return [*found, UNREAD.found(f"no answer in {_COMMAND_S:g} s", name)]
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error)
            found.append(UNREAD.found(said, name))
    return found


def _ask(system: System, device: str) -> str | None:
    for program, words in (
        ("nvme", ["smart-log", device, "--output-format=json"]),
        ("smartctl", ["--json", "-A", device]),
    ):
        for place in _PLACES:
            try:
                return system.command([f"{place}/{program}", *words], _COMMAND_S).out
            except FileNotFoundError:
                continue
    return None


CHECK = Check(
    name="nvme_smart",
    run=_run,
    conditions=(WARNING, WORN, MEDIA, UNREAD),
    settings={
        "used": Setting(100, "share of the rated writes used that raises a warning", "%"),
        "media_errors": Setting(10, "data integrity errors of a drive that raise no warning"),
    },
    where=frozenset({"sweep", "deep"}),
    closes_on_error=False,
    deadline_s=5.0,
    cost_ms=30.0,
)
