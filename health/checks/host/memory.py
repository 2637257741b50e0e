"""Memory: as much as slurm.conf states, free while no job runs, and without errors.

Sources: /proc/meminfo, the EDAC counters (Documentation/driver-api/edac.rst), and on ZFS nodes the
size of its cache, which the kernel does not count as available although it gives way.
"""

from __future__ import annotations

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node import jobs, slurmconf
from health.node.sysfs import fleet, names, number, text
from health.node.system import System

MISSING = Condition(
    "memory-missing",
    "FAIL",
    "node",
    "reboot",
    "less memory than slurm.conf or the fleet's record states",
)
TAKEN = Condition(
    "memory-taken",
    "FAIL",
    "user",
    "clear-leftovers",
    "no job runs here, and almost no memory is available",
)
HELD = Condition(
    "memory-held", "WARN", "user", "none", "no job runs here, and much memory is in use"
)
SWAP = Condition("swap-used", "WARN", "node", "none", "no job runs here, and much swap is in use")
HUGEPAGES = Condition(
    "hugepages-held", "WARN", "node", "none", "no job runs here, and huge pages are in use"
)
UNCORRECTED = Condition(
    "memory-uncorrected",
    "FAIL",
    "node",
    "reboot",
    "EDAC counts an uncorrectable memory error since boot",
)
CORRECTED = Condition(
    "memory-corrected", "WARN", "node", "none", "EDAC counts many corrected memory errors"
)

EDAC = "/sys/devices/system/edac/mc"
GIB = 1 << 20  # KiB
DAY = 86_400


def parse_meminfo(content: str) -> dict[str, int]:
    """Values of /proc/meminfo: KiB, or a number of pages for HugePages_*."""
    out = {}
    for line in content.splitlines():
        key, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            out[key] = int(value[0])
    return out


def judge_size(total: int, wanted: int, tolerance: float, source: str) -> list[Finding]:
    """Judge the size in KiB; ``tolerance``: percent that the kernel may keep to itself, a little
    more with each release."""
    if total >= wanted * (1 - tolerance / 100):
        return []
    said = f"{total // 1024} MiB, {source} says {wanted // 1024} MiB (tolerance {tolerance:g} %)"
    return [MISSING.found(said)]


def judge_idle(info: dict[str, int], cache_kib: int, taken: float, held: float) -> list[Finding]:
    """Memory that is in use although no job runs. Limits in percent of MemTotal."""
    total = info.get("MemTotal", 0)
    if not total or "MemAvailable" not in info:
        return []
    found = []
    free = info["MemAvailable"] + cache_kib
    share = 100 * free / total
    said = (
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB available with no job here "
        f"({share:.0f} %; shared memory and tmpfs {info.get('Shmem', 0) / GIB:.1f} GiB, "
        f"processes {info.get('AnonPages', 0) / GIB:.1f} GiB), limit"
    )
    if share < taken:
        found.append(TAKEN.found(f"{said} {taken:g} %"))
    elif share < held:
        found.append(HELD.found(f"{said} {held:g} %"))
    swap = info.get("SwapTotal", 0) - info.get("SwapFree", 0) - info.get("SwapCached", 0)
    if swap > GIB and swap > 0.1 * info["SwapTotal"]:
        found.append(SWAP.found(f"{swap / GIB:.1f} GiB of swap in use, limit 1 GiB and 10 %"))
    return found


def judge_hugepages(info: dict[str, int], allowed_gib: float) -> list[Finding]:
    pages = info.get("HugePages_Total", 0) - info.get("HugePages_Free", 0)
    used = pages * info.get("Hugepagesize", 0)
    if used <= allowed_gib * GIB:
        return []
    said = f"{pages} huge pages ({used / GIB:.1f} GiB) in use with no job here"
    return [HUGEPAGES.found(f"{said}, allowed {allowed_gib:g} GiB")]


def _run(system: System) -> list[Finding]:
    options = system.options("memory")
    info = parse_meminfo(text(system, "/proc/meminfo"))
    conf = slurmconf.load(system)
    found = _size(system, conf, info.get("MemTotal", 0), float(options["tolerance"]))
    if jobs.running(system) == frozenset():
        idle = judge_idle(info, 0, float(options["taken"]), float(options["held"]))
        if any(finding.check in ("memory-taken", "memory-held") for finding in idle):
            cache = _zfs_cache(system)
            idle = judge_idle(info, cache, float(options["taken"]), float(options["held"]))
        found += idle + judge_hugepages(info, float(options["hugepages"]))
    return found + _edac(system, int(options["corrected_per_day"]))


def _size(system: System, conf: slurmconf.Conf, total_kib: int, tolerance: float) -> list[Finding]:
    if not total_kib:
        return []
    recorded = fleet(system).get("memory")
    if isinstance(recorded, int):
        return judge_size(total_kib, recorded, tolerance, "the fleet's record")
    overridden = "config_overrides" in conf.values.get("slurmdparameters", "").lower()
    if conf.node is None or overridden:  # then RealMemory is whatever the site wants it to be
        return []
    return judge_size(
        total_kib, conf.node.real_memory * 1024, tolerance, "RealMemory of slurm.conf"
    )


def _zfs_cache(system: System) -> int:
    """KiB of the ARC: "size 4 <bytes>" in its kstat."""
    for line in text(system, "/proc/spl/kstat/zfs/arcstats").splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0] == "size" and fields[2].isdigit():
            return int(fields[2]) // 1024
    return 0


def _edac(system: System, per_day: int) -> list[Finding]:
    found = []
    for controller in names(system, EDAC):
        base = f"{EDAC}/{controller}"
        if not controller.startswith("mc"):
            continue
        uncorrected = number(system, f"{base}/ue_count") or 0
        corrected = number(system, f"{base}/ce_count") or 0
        if uncorrected:
            said = f"ue_count {uncorrected}, limit 0{_worst_dimm(system, base, 'ue')}"
            found.append(UNCORRECTED.found(said, controller))
        if corrected > per_day:
            seconds = number(system, f"{base}/seconds_since_reset") or int(system.uptime())
            rate = corrected * DAY / max(seconds, DAY)
            if rate > per_day:
                said = f"ce_count {corrected}, {rate:.0f} a day, limit {per_day}"
                found.append(CORRECTED.found(said + _worst_dimm(system, base, "ce"), controller))
    return found


def _worst_dimm(system: System, base: str, kind: str) -> str:
    """ ", DIMM <label>": the one that counts most."""
    best, label = 0, ""
    for name in names(system, base):
        if name.startswith(("dimm", "rank")):
            count = number(system, f"{base}/{name}/dimm_{kind}_count") or 0
            if count > best:
                best, label = count, text(system, f"{base}/{name}/dimm_label") or name
    return f", DIMM {label}" if label else ""


CHECK = Check(
    name="memory",
    run=_run,
    conditions=(MISSING, TAKEN, HELD, SWAP, HUGEPAGES, UNCORRECTED, CORRECTED),
    settings={
        "tolerance": Setting(2.0, "tolerated shortfall from the configured memory", "%"),
        "taken": Setting(20.0, "available memory below which an idle node accepts no jobs", "%"),
        "held": Setting(50.0, "available memory below which an idle node is reported", "%"),
        "hugepages": Setting(1.0, "huge pages that may be in use on an idle node", "GiB"),
        "corrected_per_day": Setting(1000, "corrected memory errors of one controller", "a day"),
    },
    closes_on_error=False,
    cost_ms=1.0,
)
