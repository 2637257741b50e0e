"""Read a node's hardware and load from /sys and /proc: why a machine may be slower than others.

Only what every user may read. What is missing, or cannot be read, says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from robust_slurm.text import one_line
from srun_wrapper.protocol.looking_messages import STOLEN, SWAPPED, THROTTLED, Machine

SECONDS = 1.0  # until no more files are opened
WORD = 60  # characters of a name
MOST = 16  # of a kind
CPUS = ("coretemp", "k10temp", "zenpower")
_PACKAGE = "thermal_throttle/package_throttle_count"
_USED = ("infiniband", "net", "nvme", "drm")


def read(root: Path = Path("/"), seconds: float = SECONDS) -> Machine:
    """Return what is known; ``seconds``: see ``SECONDS``."""
    until = time.monotonic() + seconds
    sys, proc = root / "sys", root / "proc"
    return Machine(
        tuple(_hot(sys, until))[:MOST],
        tuple(_below(sys, until))[:MOST],
        dict([*_infiniband(sys, until), *_ethernet(sys, until)][:MOST]),
        dict(_counts(sys, proc, until)),
        dict(_load(proc)),
    )


def _hot(sys: Path, until: float) -> Iterator[str]:
    """The CPUs' sensors at the limit that they name themselves (degrees in thousandths).

    That is ``crit``, where they throttle. At ``max`` the fans run at full speed: many CPUs do that
    whenever they work.
    """
    for sensor in _entries(sys / "class/hwmon", until):
        chip = _text(sensor / "name")
        if chip not in CPUS:  # to read others may wait for the device
            continue
        for path in _entries(sensor, until):
            if not (path.name.startswith("temp") and path.name.endswith("_input")):
                continue
            base = path.name.removesuffix("_input")
            now = _number(path)
            most = _number(sensor / f"{base}_crit")
            if now is not None and most and most > 0 and now >= most:
                label = one_line(_text(sensor / f"{base}_label") or base, WORD)
                yield f"{chip} {label}: {now / 1000:.0f} °C, limit {most / 1000:.0f} °C"


def _below(sys: Path, until: float) -> Iterator[str]:
    """PCIe devices in use whose link is narrower than the device and the slot above it allow.

    Not those that are slower: an idle link slows down to save power.
    """
    for device in _entries(sys / "bus/pci/devices", until):
        if not ((device / "driver").exists() and (device / "max_link_width").exists()):
            continue
        width, most = _number(device / "current_link_width"), _number(device / "max_link_width")
        above = _number(device.resolve().parent / "max_link_width") if most else None
        most = min(most or 0, above) if above else most
        if width and most and 0 < width < most < 64:
            used = [e.name for kind in _USED for e in _entries(device / kind, until)]
            name = f"PCIe {device.name}" + (f" ({one_line(used[0], WORD)})" if used else "")
            yield f"{name}: x{width:.0f} of x{most:.0f}"


def _infiniband(sys: Path, until: float) -> Iterator[tuple[str, float]]:
    for adapter in _entries(sys / "class/infiniband", until):
        for port in _entries(adapter / "ports", until):
            words = _text(port / "rate").split()  # "200 Gb/sec (4X HDR)"
            if words and (rate := _float(words[0])):
                yield one_line(f"{adapter.name} port {port.name}", WORD), rate


def _ethernet(sys: Path, until: float) -> Iterator[tuple[str, float]]:
    for interface in _entries(sys / "class/net", until):
        if not (interface / "device").exists() or _text(interface / "operstate") != "up":
            continue
        if (speed := _number(interface / "speed")) and speed > 0:  # Mb/s; -1: unknown
            yield one_line(interface.name, WORD), speed / 1000


def _counts(sys: Path, proc: Path, until: float) -> Iterator[tuple[str, int]]:
    counts = [
        _number(cpu / _PACKAGE)
        for cpu in _entries(sys / "devices/system/cpu", until)
        if cpu.name[3:].isdigit()
    ]
    if known := [int(count) for count in counts if count is not None]:
        yield THROTTLED, max(known)
    swapped = dict(line.split(" ")[:2] for line in _lines(proc / "vmstat") if " " in line)
    if swapped.get("pswpin", "").isdigit():
        yield SWAPPED, int(swapped["pswpin"])
    first = next(iter(_lines(proc / "stat")), "").split()
    if len(first) > 8 and first[8].isdigit():
        yield STOLEN, int(first[8])


def _load(proc: Path) -> Iterator[tuple[str, float]]:
    """Return pressure stall information: the share of the last 10 s in which processes waited."""
    for name, line, what in (("cpu", "some", "CPU"), ("memory", "full", "memory")):
        for each in _lines(proc / "pressure" / name):
            kind, _, rest = each.partition(" avg10=")
            share = _float(rest.partition(" ")[0]) if kind == line else None
            if share is not None:
                yield what, share


def _entries(directory: Path, until: float) -> list[Path]:
    if time.monotonic() > until:
        return []
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []  # no such hardware here


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    return _float(_text(path))


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None
