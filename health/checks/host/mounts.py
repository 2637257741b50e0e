"""Mounts: there, in the wanted mode, and answering within a deadline.

Access to a network file system hangs while its server does not answer, so only ``System.probe``, in
a process of its own, accesses one. Local file systems are judged by the kernel's table of mounts.
"""

from __future__ import annotations

import errno
import posixpath
import time
from collections.abc import Iterable
from typing import NamedTuple

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.mountinfo import LOCAL, FstabLine, Mount, fstab, is_remote, resolve, visible
from health.node.system import PROBE_NOT_STARTED, PROBE_REFUSED, System

MISSING = Condition(
    "mount-missing",
    "FAIL",
    "node",
    "none",
    "an expected mount is missing; WARN if only fstab lists it, with nofail",
)
READ_ONLY = Condition(
    "mount-read-only", "FAIL", "node", "none", "mounted read-only, expected read-write"
)
WRITABLE = Condition(
    "mount-writable", "WARN", "node", "none", "mounted read-write, expected read-only"
)
WRONG = Condition(
    "mount-wrong", "FAIL", "node", "none", "the file system type is not the expected one"
)
HUNG = Condition(
    "mount-hung",
    "FAIL",
    "node",
    "none",
    "no answer within the deadline; WARN for a mount that neither `required` nor fstab names",
)
STALE = Condition(
    "mount-stale",
    "FAIL",
    "node",
    "none",
    "stale file handle: the server no longer knows the mounted directory",
)
BROKEN = Condition(
    "mount-broken", "FAIL", "node", "none", "reading it (or writing to it, where required) fails"
)
FAILED = Condition(
    "filesystem-failed",
    "FAIL",
    "node",
    "reboot",
    "the kernel shut a local file system down or made it read-only after errors",
)
SETTING = Condition("mount-setting", "WARN", "tool", "none", "an entry of `required` is invalid")

DEADLINE_S = 6.0
OTHERS = 16  # mounts probed that nobody names


class RequiredMount(NamedTuple):
    """A mount that must be there. ``fstype`` "" is any; ``soft``: its absence is a WARN."""

    point: str
    read_only: bool = False
    write: bool = False  # prove it by writing a file
    fstype: str = ""
    soft: bool = False


def parse_wanted(entry: str) -> RequiredMount:
    """ "/scratch:rw,type=lustre" as in `required`. ValueError says what is wrong with it."""
    path, colon, words = entry.rpartition(":")
    if not colon or "/" in words:  # a colon of the path itself
        path, words = entry, ""
    if not path.startswith("/"):
        raise ValueError(f"{entry!r}: not an absolute path")
    wanted = RequiredMount(posixpath.normpath(path))
    for word in words.split(",") if words else ():
        key, _, value = word.strip().partition("=")
        if key == "type" and value:
            wanted = wanted._replace(fstype=value)
        elif word.strip() in ("ro", "rw", "write"):
            wanted = wanted._replace(read_only=key == "ro", write=key == "write")
        else:
            raise ValueError(f"{entry!r}: {word!r} is none of ro, rw, write, type=NAME")
    return wanted


def from_fstab(lines: Iterable[FstabLine]) -> list[RequiredMount]:
    """The network file systems that /etc/fstab mounts at boot, or at their first use."""
    return [
        RequiredMount(line.point, read_only="ro" in line.options, soft="nofail" in line.options)
        for line in lines
        if is_remote(line.fstype)
        and ("noauto" not in line.options or "x-systemd.automount" in line.options)
    ]


def judge(wanted: RequiredMount, mount: Mount | None) -> Finding | None:
    """Judge a wanted mount by the table of mounts; None: as wanted."""
    if mount is None:
        return _missing(wanted, "not in /proc/self/mountinfo")
    if mount.fstype == "autofs":
        return None  # its probe mounts it, or not
    what = f"{mount.fstype} {mount.source}"
    if wanted.fstype and not _same_type(wanted.fstype, mount.fstype):
        return WRONG.found(f"{what}, expected type {wanted.fstype}", wanted.point)
    if mount.read_only and not wanted.read_only:
        return READ_ONLY.found(f"{what} is mounted ro, expected rw", wanted.point)
    if wanted.read_only and not mount.read_only:
        return WRITABLE.found(f"{what} is mounted rw, expected ro", wanted.point)
    return None


def _missing(wanted: RequiredMount, text: str) -> Finding:
    if wanted.soft:
        return MISSING.found(f"{text}; /etc/fstab says nofail", wanted.point, status="WARN")
    return MISSING.found(text, wanted.point)


def judge_local(mounts: Iterable[Mount], lines: Iterable[FstabLine]) -> list[Finding]:
    """Local file systems that the kernel gave up, each device once."""
    writable = {line.point for line in lines if "ro" not in line.options}
    found: dict[str, Finding] = {}
    for mount in mounts:
        if mount.fstype not in LOCAL or mount.device in found:
            continue
        if mount.source.startswith("/dev/loop"):
            continue  # an image that a job mounted
        given_up = mount.super_options & {"emergency_ro", "shutdown"}
        if given_up:
            why = f"options say {'/'.join(sorted(given_up))}"
        elif "ro" in mount.super_options and mount.point in writable:
            why = "is read-only, /etc/fstab mounts it read-write"
        else:
            continue
        evidence = f"{mount.fstype} {mount.source} {why}"
        found[mount.device] = FAILED.found(evidence, mount.point)
    return list(found.values())


def judge_probe(error: OSError, point: str, mount: Mount, waited_s: float) -> Finding | None:
    """The finding that a failed probe proves; None: nothing against the file system."""
    what = f"{mount.fstype} {mount.source}"
    if isinstance(error, TimeoutError):
        return HUNG.found(f"{what}: no answer in {waited_s:.1f} s", point)
    code = error.errno or 0
    if code in PROBE_NOT_STARTED:
        raise error
    if code in PROBE_REFUSED:
        return None
    if code == errno.ESTALE:
        return STALE.found(f"{what}: stale file handle", point)
    if code == errno.EROFS:
        return READ_ONLY.found(f"{what}: a file could not be written, read-only", point)
    name = errno.errorcode.get(code, str(code))
    return BROKEN.found(f"{what}: {name} {error.strerror or ''}".rstrip(), point)


def _run(system: System) -> list[Finding]:
    options = system.options("mounts")
    ignored = {posixpath.normpath(path) for path in options["ignore"]}
    found: list[Finding] = []
    lines = _fstab(system)
    wanted = []
    for entry in options["required"]:
        try:
            wanted.append(parse_wanted(entry))
        except ValueError as error:
            found.append(SETTING.found(f"mounts.required: {error}"))
    if not options["required"]:
        wanted = from_fstab(lines)
    wanted = [one for one in wanted if one.point not in ignored]
    try:
        mounts = visible(system.read("/proc/self/mountinfo"))
    except FileNotFoundError:
        if wanted:
            raise
        return found
    found += judge_local((m for m in mounts.values() if m.point not in ignored), lines)

    probes = _Probes(system, float(options["deadline"]))
    seen = set()
    for one in wanted:
        point = resolve(mounts, one.point, system.link)
        mount = mounts.get(point)
        wrong = judge(one, mount)
        if wrong:
            found.append(wrong)
        if mount is None:
            continue
        seen.add(mount.device)
        found += probes.ask(one, point, mount)
    for mount in _others(mounts, seen, ignored):
        for finding in probes.ask(RequiredMount(mount.point), mount.point, mount):
            # Neither `required` nor fstab names it, and its server may be slow while every node
            # writes a checkpoint.
            slow = finding.check == HUNG.check
            unsure = slow or options["required"]
            found.append(finding._replace(status="WARN") if unsure else finding)
    if probes.skipped:
        found.append(HUNG.found(f"no time left to probe {' '.join(probes.skipped)}", status="WARN"))
    return found


class _Probes:
    """Probes of several mounts, which share one time limit: 1.5 times that of one mount."""

    def __init__(self, system: System, deadline_s: float):
        self.system = system
        self.deadline_s = deadline_s
        self.until = time.monotonic() + min(1.5 * deadline_s, DEADLINE_S - 0.5)
        self.skipped: list[str] = []

    def ask(self, wanted: RequiredMount, point: str, mount: Mount) -> list[Finding]:
        left = min(self.deadline_s, self.until - time.monotonic())
        if left < 0.1:  # an earlier one is dead, and has closed the gate
            self.skipped.append(point)
            return []
        try:
            self.system.probe(point, wanted.write, left)
        except OSError as error:
            if wanted.write and error.errno in (errno.EACCES, errno.EPERM):
                text = f"{point}: root may not write there (root_squash?); use rw, not write"
                return [SETTING.found(text, wanted.point)]
            finding = judge_probe(error, wanted.point, mount, left)
            return [finding] if finding else []
        if mount.fstype == "autofs" and "indirect" not in mount.super_options:
            # Listing a direct trigger mounts what belongs there.
            now = visible(self.system.read("/proc/self/mountinfo")).get(point)
            if now is None or now.fstype == "autofs":
                return [_missing(wanted, f"automount {mount.source} did not mount it")]
            wrong = judge(wanted, now)
            return [wrong] if wrong else []
        return []


def _others(mounts: dict[str, Mount], seen: set[str], ignored: set[str]) -> list[Mount]:
    """Network mounts that nobody names, each file system once. No fuse: any user mounts those."""
    out: dict[str, Mount] = {}
    for mount in mounts.values():
        fuse = mount.fstype.startswith("fuse.")
        if mount.remote and not fuse and mount.device not in seen and mount.point not in ignored:
            out.setdefault(mount.device, mount)
    return list(out.values())[:OTHERS]


def _fstab(system: System) -> list[FstabLine]:
    try:
        return fstab(system.read("/etc/fstab"))
    except FileNotFoundError:
        return []


def _same_type(wanted: str, actual: str) -> bool:
    return wanted == actual or {wanted, actual} == {"nfs", "nfs4"} or actual == f"fuse.{wanted}"


CHECK = Check(
    name="mounts",
    run=_run,
    conditions=(MISSING, READ_ONLY, WRITABLE, WRONG, HUNG, STALE, BROKEN, FAILED, SETTING),
    settings={
        "required": Setting(
            [],
            'mounts that must be there: "/scratch", "/data:ro", "/home:rw,type=nfs4"; "write" '
            "proves it by writing a file; empty: the network file systems of /etc/fstab",
        ),
        "ignore": Setting([], "mount points to ignore"),
        "deadline": Setting(3.0, "time limit for the answer of one mount", "s"),
    },
    deadline_s=DEADLINE_S,
    cost_ms=1.0,
)
