"""Trouble of the operating system in the kernel's log: memory, disks, file systems, links, hangs.

Patterns are those of the kernel's source (mm/oom_kill.c, block/blk-core.c, drivers/nvme/host,
fs/ext4, fs/xfs, fs/btrfs, drivers/md, kernel/watchdog.c, kernel/hung_task.c, the network drivers).
File systems on loop devices are images that jobs mount: not the node's trouble.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.kernlog import evidence, loud, within
from health.node.sysfs import text
from health.node.system import LogRecord, System
from robust_slurm.text import span

OOM = Condition("oom", "WARN", "user", "none", "memory ran out in the last `recent`")
IO_ERROR = Condition("io-error", "WARN", "node", "none", "an I/O error of a disk in `disk_window`")
IO_ERRORS = Condition("io-errors", "FAIL", "node", "service", "`io_errors` of one disk")
NVME_RESET = Condition("nvme-reset", "WARN", "node", "none", "an NVMe was reset in `disk_window`")
NVME_RESETS = Condition("nvme-resets", "FAIL", "node", "service", "`nvme_resets` of one NVMe")
NVME_DOWN = Condition("nvme-down", "FAIL", "node", "reboot", "the kernel gave up an NVMe or RAID")
FS_ERROR = Condition("fs-error", "FAIL", "node", "reboot", "a file system detected damage")
FS_READONLY = Condition("fs-readonly", "FAIL", "node", "reboot", "remounted read-only by an error")
FLAPS = Condition("link-flaps", "WARN", "node", "none", "a link went down `flaps` times in an hour")
FLAPPING = Condition("link-flapping", "FAIL", "node", "service", "… `flapping` times in an hour")
HUNG = Condition("hung-task", "WARN", "node", "none", "a task hung in the last `recent`")
LOCKUP = Condition("soft-lockup", "WARN", "node", "none", "a processor hung in the last `recent`")
# A program can make the kernel work for so long; what stays broken goes on saying so.
LOCKUPS = Condition("soft-lockups", "FAIL", "user", "none", "`lockups` of them")
HARD = Condition("hard-lockup", "FAIL", "node", "reboot", "a processor hung with interrupts off")
OOPS = Condition(
    "kernel-oops", "FAIL", "node", "reboot", "the kernel itself failed (oops) and continued"
)
LOST = Condition(
    "log-overrun",
    "WARN",
    "node",
    "none",
    "messages overwrite the log faster than it can be read, or within `reach`: faults may be lost",
)

BOOT_S = 300.0  # links come and go while drivers and the network start


class LogRule(NamedTuple):
    """A kind of message to find. ``needle`` is in every such message; the group "device", where the
    pattern has one, tells what it is about. ``window``: the setting with its length, "" since
    boot; ``limit``: the setting from which on ``many`` holds in place of ``one``. ``on_pcie``: NVMe
    over a network says the same when its server is away: it counts only for one on PCIe."""

    needle: str
    pattern: str
    one: Condition
    window: str = ""
    limit: str = ""
    many: Condition | None = None
    on_pcie: bool = False


_DISK = r"(?P<device>nvme\d+(?:c\d+)?n\d+|sd[a-z]{1,3}|vd[a-z]{1,2}|mmcblk\d+)"
_FS = r"(?P<device>[\w.-]{1,40}?)"
RULES = (
    LogRule(
        "ut of memory: Killed process",
        r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \(",
        OOM,
        "recent",
    ),
    LogRule(
        " error, dev ",
        r"(?:blk_update_request: |print_req_error: )?(?:I/O|critical medium|critical target) error,"
        rf" dev {_DISK}, sector \d+\b(?! op 0x\w+:\((?:DISCARD|WRITE_ZEROES))",
        IO_ERROR,
        "disk_window",
        "io_errors",
        IO_ERRORS,
    ),
    LogRule(
        "nvme nvme",
        r"nvme (?P<device>nvme\d+): (?:I/O (?:tag )?\d+ .*timeout, (?:reset|disable) controller"
        r"|controller is down; will reset|frozen state error detected, reset controller)",
        NVME_RESET,
        "disk_window",
        "nvme_resets",
        NVME_RESETS,
    ),
    LogRule(
        "nvme nvme",
        r"nvme (?P<device>nvme\d+): (?:Disabling device after reset failure"
        r"|Removing after probe failure)",
        NVME_DOWN,
    ),
    LogRule(
        "Device not ready; aborting",
        r"nvme (?P<device>nvme\d+): Device not ready; aborting",
        NVME_DOWN,
        on_pcie=True,
    ),
    LogRule(
        "no available path - failing I/O",
        r"block (?P<device>nvme\w+): no available path - failing I/O",
        NVME_DOWN,
        on_pcie=True,
    ),
    LogRule(
        "failing array",
        r"md/raid\d*:?(?P<device>md\w+): Disk failure on \S+ detected, failing array",
        NVME_DOWN,
    ),
    LogRule("EXT", rf"EXT[234]-fs error \(device {_FS}\): ", FS_ERROR),
    LogRule("Aborting journal", rf"Aborting journal on device {_FS}(?:[-:]8)?\.", FS_ERROR),
    LogRule(
        "XFS (",
        rf"XFS \({_FS}\): (?:(?:Metadata )?[Cc]orruption |Metadata CRC error|Internal error "
        r"|log I/O error|[Mm]etadata I/O error|Filesystem has been shut down"
        r"|xfs_do_force_shutdown|I/O Error Detected\. Shutting down)",
        FS_ERROR,
    ),
    LogRule("BTRFS", rf"BTRFS (?:error|critical) \(device {_FS}(?: state \w+)?\): ", FS_ERROR),
    LogRule(
        "Remounting filesystem read-only",
        rf"\w+-?\w* \({_FS}\): Remounting filesystem read-only",
        FS_READONLY,
    ),
    LogRule(
        "blocked for more than",
        r"INFO: task .{1,16}:\d+ blocked for more than \d+ seconds",
        HUNG,
        "recent",
    ),
    LogRule(
        "soft lockup",
        r"(?:watchdog: )?BUG: soft lockup - CPU#\d+ stuck for \d+s",
        LOCKUP,
        "recent",
        "lockups",
        LOCKUPS,
    ),
    LogRule(
        "detected ",
        r"rcu: INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stall",
        LOCKUP,
        "recent",
        "lockups",
        LOCKUPS,
    ),
    LogRule("hard LOCKUP", r"(?:NMI )?watchdog: Watchdog detected hard LOCKUP on cpu", HARD),
    LogRule(
        "Oops: ", r"(?:Oops: |Internal error: )?Oops: [\w: ]{4,40}\[#\d+\] (?:PREEMPT|SMP)", OOPS
    ),
    LogRule("BUG: ", r"BUG: (?:unable to handle |kernel NULL pointer dereference)", OOPS),
    LogRule("kernel BUG at ", r"kernel BUG at [\w./-]{1,120}:\d+!$", OOPS),
    LogRule("general protection fault", r"general protection fault.{1,120}\[#\d+\]", OOPS),
)
# A driver names itself, the device, and its interface.
_LINK_DOWN = (
    r"[\w-]{2,20} [0-9a-f]{4,6}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]:? (?P<device>[a-zA-Z]\w{0,14})"
    r"(?: \([\w, ]+\))?: (?:[\w-]+: )?(?:\w+ )?(?:NIC )?[Ll]ink (?:is )?[Dd]own"
    r"|e1000e?: (?P<old>[a-zA-Z]\w{0,14}) NIC Link is Down"
)


def find(records: Iterable[LogRecord], needle: str, pattern: str) -> dict[str, list[LogRecord]]:
    """The messages of one kind, by device ("" where it has none); none of loop devices."""
    out: dict[str, list[LogRecord]] = {}
    for record in records:
        if needle in record.text and (match := re.match(pattern, record.text)):
            names = match.groupdict()
            device = names.get("device") or names.get("old") or ""
            if not device.startswith("loop"):
                out.setdefault(device, []).append(record)
    return out


def judge(
    records: Iterable[LogRecord],
    uptime: float,
    options: Mapping[str, Any],
    on_pcie: Callable[[str], bool],
) -> list[Finding]:
    """Findings from the records of one boot; ``on_pcie``: whether an NVMe's controller is."""
    every = list(records)
    trouble = loud(every)
    found: dict[tuple[str, str], list[LogRecord]] = {}
    rules: dict[str, LogRule] = {}
    for rule in RULES:
        window = options[rule.window] if rule.window else uptime
        for device, mine in find(trouble, rule.needle, rule.pattern).items():
            if rule.on_pcie and not on_pcie(device):
                continue
            recent = within(mine, uptime, window) if rule.window else mine
            if recent:
                rules[rule.one.check] = rule
                found.setdefault((rule.one.check, device), []).extend(recent)
    out = []
    for (check, device), mine in found.items():
        rule = rules[check]
        over = rule.many is not None and len(mine) >= options[rule.limit]
        condition = rule.many if over and rule.many else rule.one
        limit = f"limit {options[rule.limit]}: " if over else ""
        told = evidence(sorted(mine, key=lambda record: record.time), uptime)
        out.append(condition.found(limit + told, device))
    out += overrun(every, uptime, options["reach"])
    return out + links(every, uptime, options["flaps"], options["flapping"])


def overrun(records: Sequence[LogRecord], uptime: float, reach: float) -> list[Finding]:
    """A finding if the kernel overwrote messages before they could be read."""
    if not records:
        return []
    lost = sum(record.lost for record in records)
    text = f"{lost} records overwritten while the log was read" if lost > 1 else ""
    text = text or ("1 record overwritten while the log was read" if lost else "")
    first = records[0]
    if not text and first.seq > 0 and uptime - first.time < reach:
        text = f"the log reaches back {span(uptime - first.time)} only, expected {span(reach)}"
        text += f", {first.seq} records before were overwritten"
    if not text:
        return []
    return [LOST.found(f"{text}; faults among them are lost: enlarge log_buf_len (/dev/kmsg)")]


def links(records: Iterable[LogRecord], uptime: float, flaps: int, flapping: int) -> list[Finding]:
    """Links of network adapters that went down again and again in the last hour."""
    later = [record for record in within(records, uptime, 3600.0) if record.time > BOOT_S]
    out = []
    for device, mine in find(later, "ink", _LINK_DOWN).items():
        if len(mine) >= min(flaps, flapping):
            condition, limit = (FLAPPING, flapping) if len(mine) >= flapping else (FLAPS, flaps)
            out.append(condition.found(f"limit {limit}: {evidence(mine, uptime)}", device))
    return out


def run(system: System) -> list[Finding]:
    def on_pcie(device: str) -> bool:
        controller = re.sub(r"(nvme\d+).*", r"\1", device)
        return text(system, f"/sys/class/nvme/{controller}/transport") == "pcie"

    return judge(system.kernel_log(), system.uptime(), system.options("kernel_log"), on_pcie)


CHECK = Check(
    name="kernel_log",
    run=run,
    conditions=(
        OOM,
        IO_ERROR,
        IO_ERRORS,
        NVME_RESET,
        NVME_RESETS,
        NVME_DOWN,
        FS_ERROR,
        FS_READONLY,
        FLAPS,
        FLAPPING,
        HUNG,
        LOCKUP,
        LOCKUPS,
        HARD,
        OOPS,
        LOST,
    ),
    settings={
        "recent": Setting(
            3600.0, "how long out-of-memory kills, hangs and lockups are reported", "s"
        ),
        "disk_window": Setting(86400.0, "how long errors of disks count", "s"),
        "io_errors": Setting(10, "I/O errors of one disk in disk_window that close the gate"),
        "nvme_resets": Setting(3, "resets of one NVMe in disk_window that close the gate"),
        "flaps": Setting(3, "link-down events per hour that raise a warning"),
        "flapping": Setting(10, "link-down events per hour that close the gate"),
        "reach": Setting(300.0, "shortest period that the log must cover; 0: not checked", "s"),
        "lockups": Setting(5, "soft lockups and RCU stalls in `recent` that close the gate"),
    },
    cost_ms=3.0,
)
