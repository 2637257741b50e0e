"""Space and inodes of the local file systems that a job needs, and the disks under them.

A path on a network file system is looked at only if the site asks for it (`minimum`), and after a
probe: asking a dead one would hang.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node import jobs, slurmconf
from health.node.leftover_files import Holdings, holdings
from health.node.mountinfo import Mount, holding, resolve, visible
from health.node.sysfs import fleet, local_nvme, names, text
from health.node.system import PROBE_NOT_STARTED, PROBE_REFUSED, Disk, System

GIB = 1 << 30

FULL = Condition(
    "disk-full",
    "FAIL",
    "node",
    "none",
    "less free space than the limit, and the system's own files are seen to be the cause; class "
    "user where that is not proven, and on a network file system",
)
LEFTOVERS = Condition(
    "disk-full-leftovers",
    "FAIL",
    "user",
    "clear-leftovers",
    "less free space than the limit because of users' files; WARN while a job that may own them "
    "runs here (not in the prolog)",
)
LOW = Condition("disk-low", "WARN", "node", "none", "little free space")
INODES_FULL = Condition(
    "inodes-full", "FAIL", "node", "none", "almost no free inodes; class as for disk-full"
)
INODES_LOW = Condition("inodes-low", "WARN", "node", "none", "few free inodes")
BROKEN = Condition(
    "disk-broken", "FAIL", "node", "reboot", "the file system fails when asked for its size"
)
NVME_DEAD = Condition(
    "nvme-dead", "FAIL", "node", "reboot", "the driver gave up an NVMe controller"
)
NVME_MISSING = Condition(
    "nvme-missing", "FAIL", "node", "reboot", "fewer NVMe controllers than configured"
)
RAID = Condition("raid-degraded", "WARN", "node", "none", "an md array runs without all its disks")
SETTING = Condition("disk-setting", "WARN", "tool", "none", "a value of `minimum` cannot be used")

# Full is less than both, so that neither a huge disk nor a tiny tmpfs is full by rounding.
FULL_BYTES, FULL_SHARE = GIB // 2, 0.05
LOW_BYTES, LOW_SHARE = 10 * GIB, 0.10
FULL_INODES, FULL_INODE_SHARE = 5_000, 0.01
LOW_INODES, LOW_INODE_SHARE = 50_000, 0.05
_SYSTEMS = ("/", "/var")
LOOK_S = 1.0  # for all looks at whose files fill a file system
PROBE_S = 1.0  # for a network file system to answer before its size is asked

_MD = re.compile(r"^(md\S+) : active", re.MULTILINE)
_MEMBERS = re.compile(r"\[(\d+)/(\d+)\] \[[U_]+\]")


class Shortage(NamedTuple):
    """``level`` "full", "low" or "" (enough); ``missing``: bytes or inodes up to the limit."""

    level: str
    said: str
    missing: int


ENOUGH = Shortage("", "", 0)


def judge_space(disk: Disk, minimum: int | None) -> Shortage:
    """``minimum``: the site's own limit in bytes, in place of the general ones."""
    if disk.total <= 0 or disk.read_only:
        return ENOUGH
    share = disk.free / disk.total
    said = f"{size(disk.free)} free of {size(disk.total)} ({share:.1%})"
    if minimum is not None:
        if disk.free >= minimum:
            return ENOUGH
        return Shortage("full", f"{said}, expected {size(minimum)}", minimum - disk.free)
    if disk.free < FULL_BYTES and share < FULL_SHARE:
        limit = min(FULL_BYTES, int(FULL_SHARE * disk.total))
        said = f"{said}, limit {size(FULL_BYTES)} and {FULL_SHARE:.0%}"
        return Shortage("full", said, limit - disk.free)
    if disk.free < LOW_BYTES and share < LOW_SHARE:
        return Shortage("low", f"{said}, limit {size(LOW_BYTES)} and {LOW_SHARE:.0%}", 0)
    return ENOUGH


def judge_inodes(disk: Disk) -> Shortage:
    if disk.inodes <= 0 or disk.read_only:
        return ENOUGH
    share = disk.inodes_free / disk.inodes
    said = f"{disk.inodes_free} inodes free of {disk.inodes} ({share:.1%})"
    if disk.inodes_free < FULL_INODES and share < FULL_INODE_SHARE:
        limit = min(FULL_INODES, int(FULL_INODE_SHARE * disk.inodes))
        said = f"{said}, limit {FULL_INODES} and {FULL_INODE_SHARE:.0%}"
        return Shortage("full", said, limit - disk.inodes_free)
    if disk.inodes_free < LOW_INODES and share < LOW_INODE_SHARE:
        return Shortage("low", f"{said}, limit {LOW_INODES} and {LOW_INODE_SHARE:.0%}", 0)
    return ENOUGH


def degraded_arrays(mdstat: str) -> list[tuple[str, str]]:
    """(array, evidence) of md arrays that run with fewer disks than they were made of."""
    out = []
    for block in re.split(r"\n(?=md)", mdstat):
        name, members = _MD.search(block), _MEMBERS.search(block)
        if name and members and int(members[2]) < int(members[1]):
            out.append((name[1], f"{members[2]} of {members[1]} disks, /proc/mdstat"))
    return out


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class _Node(NamedTuple):
    system: System
    mounts: Mapping[str, Mount]
    systems: tuple[str, ...]  # paths below which only the system writes
    look_s: float  # for the look at whose files fill one file system


class _Room(NamedTuple):
    """A file system: a path on it, where that really is, its size, and the site's own limit."""

    path: str
    real: str
    disk: Disk
    minimum: int | None

    @property
    def space(self) -> Shortage:
        return judge_space(self.disk, self.minimum)

    @property
    def inodes(self) -> Shortage:
        return judge_inodes(self.disk)

    @property
    def is_full(self) -> bool:
        return "full" in (self.space.level, self.inodes.level)


def _run(system: System) -> list[Finding]:
    options = system.options("disk")
    found: list[Finding] = []
    minimum = _minimum(options["minimum"], found)
    paths = [*minimum, *options["paths"]]
    systems = list(_SYSTEMS)
    if slurmconf.load(system).path:
        systems.append(posixpath.normpath(slurmconf.spool_dir(system)))
        paths.append(systems[-1])
    mounts = _mounts(system)
    seen = set()  # file systems
    rooms: list[_Room] = []
    silent = False  # a network file system did not answer: no time for another
    unstarted: OSError | None = None  # a probe had no room for its process: the gate's trouble
    for path in dict.fromkeys(map(posixpath.normpath, paths)):
        real = resolve(mounts, path, system.link)
        mount = holding(mounts, real)
        may_hang = mount is not None and mount.may_hang
        if may_hang and (silent or path not in minimum):
            continue
        key = mount.device if mount else path
        if key in seen and path not in minimum:
            continue
        try:
            if may_hang:
                system.probe(real, False, PROBE_S)
            disk = system.disk(real)
        except TimeoutError:
            silent = True  # the mounts family says so
            continue
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno in PROBE_NOT_STARTED:
                unstarted = error
                continue
            served = mount is not None and mount.remote and not mount.fstype.startswith("fuse.")
            theirs = mount is not None and mount.of_user
            if served or theirs or error.errno in PROBE_REFUSED:
                continue  # the mounts family judges servers; or it is a user's own file system
            found.append(BROKEN.found(f"statvfs: {error.strerror}", path))
            continue
        seen.add(key)
        rooms.append(_Room(path, real, disk, minimum.get(path)))
    full = sum(room.is_full for room in rooms)
    node = _Node(system, mounts, tuple(systems), LOOK_S / max(1, full))
    for room in rooms:
        found += _space(room, node)
    found += _nvme(system, options["nvme"])
    arrays = degraded_arrays(text(system, "/proc/mdstat"))
    found += [RAID.found(evidence, name) for name, evidence in arrays]
    if unstarted is not None and all(finding.status != "FAIL" for finding in found):
        raise unstarted
    return found


def _space(room: _Room, node: _Node) -> list[Finding]:
    path, space, inodes = room.path, room.space, room.inodes
    found = []
    if space.level == "low":
        found.append(LOW.found(space.said, path))
    if inodes.level == "low":
        found.append(INODES_LOW.found(inodes.said, path))
    if not room.is_full:
        return found
    mount = holding(node.mounts, room.real)
    if mount is not None and mount.may_hang:
        held = Holdings(0, 0, "a network file system: not the node's fault")
    else:
        total, look_s = room.disk.total, node.look_s
        held = holdings(node.system, room.real, node.mounts, total, node.systems, look_s)
    if space.level == "full":
        theirs = held.bytes >= space.missing and held.bytes > 0
        most = room.disk.total - room.disk.free - held.system_bytes
        condition = LEFTOVERS if theirs else FULL
        found.append(_full(condition, space, path, held, most, node))
    if inodes.level == "full":
        most = room.disk.inodes - room.disk.inodes_free - held.system_files
        found.append(_full(INODES_FULL, inodes, path, held, most, node))
    return found


def _full(
    condition: Condition, shortage: Shortage, path: str, held: Holdings, most: int, node: _Node
) -> Finding:
    """``most``: what users may hold at most. A node is blamed only if that is not the cause."""
    said = f"{shortage.said}; {held.said}" if held.said else shortage.said
    if most < shortage.missing:
        return condition.found(said, path)
    finding = condition.found(said, path, cls="user", action="clear-leftovers", uid=held.uid)
    if node.system.context.where == "prolog":
        return finding  # the next job would meet a full disk, whoever fills it
    alone = jobs.running(node.system) == frozenset()
    return finding if alone else finding._replace(status="WARN")


def _nvme(system: System, wanted: int) -> list[Finding]:
    base = "/sys/class/nvme"
    local = local_nvme(system)
    found = [
        NVME_DEAD.found(f"{base}/{name}/state is dead", name)
        for name in local
        if text(system, f"{base}/{name}/state") == "dead"
    ]
    seen, source = len(local), "disk.nvme"
    if wanted < 0:
        record, source = fleet(system), "the fleet's record"
        # "nvme" is of an earlier release, which counted those over a network, too, or it was edited
        # by hand: the smaller number counts.
        counted = {"nvme_local": seen, "nvme": len(names(system, base))}
        known = [(record.get(key), count) for key, count in counted.items()]
        wanted, seen = min(
            ((number, count) for number, count in known if isinstance(number, int)),
            default=(0, seen),
        )
    if seen < wanted:
        found.append(NVME_MISSING.found(f"{seen} in {base}, {source} says {wanted}"))
    return found


def _minimum(table: Mapping[str, Any], found: list[Finding]) -> dict[str, int]:
    out = {}
    for path, value in table.items():
        if path.startswith("/") and isinstance(value, int | float) and value >= 0:
            out[posixpath.normpath(path)] = int(value * GIB)
        else:
            said = f"disk.minimum: {path!r} = {value!r}: use an absolute path and GiB"
            found.append(SETTING.found(said))
    return out


def _mounts(system: System) -> dict[str, Mount]:
    try:
        return visible(system.read("/proc/self/mountinfo"))
    except FileNotFoundError:
        return {}


CHECK = Check(
    name="disk",
    run=_run,
    conditions=(
        FULL,
        LEFTOVERS,
        LOW,
        INODES_FULL,
        INODES_LOW,
        BROKEN,
        NVME_DEAD,
        NVME_MISSING,
        RAID,
        SETTING,
    ),
    settings={
        "paths": Setting(
            ["/", "/tmp", "/var", "/var/tmp", "/dev/shm"],
            "file systems whose free space is checked, besides SlurmdSpoolDir",
        ),
        "minimum": Setting(
            {}, 'free space that a path must have: {"/scratch" = 100, "/tmp" = 20}', "GiB"
        ),
        "nvme": Setting(-1, "NVMe controllers of this node; -1: as the fleet's record says"),
    },
    deadline_s=4.0,
    cost_ms=1.0,
)
