"""Read this node's error counters: InfiniBand, Ethernet, PCIe (AER), the host's memory.

Only what /sys lets every user read. A counter that is missing or cannot be read says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from robust_slurm.error_counters import (
    AER_KINDS,
    LINK_COUNTERS,
    RETRY_COUNTERS,
    count_aer,
    parse_aer,
)

SECONDS = 1.0  # until no more files are opened: reading one asks the device
# Not rx_dropped: it also counts packets of protocols that nobody on a healthy node listens to.
ETHERNET = (
    *("rx_errors", "tx_errors", "rx_crc_errors", "rx_missed_errors", "rx_fifo_errors"),
    *("tx_carrier_errors", "tx_fifo_errors"),
)

_Counter = tuple[str, Path, Callable[[str], int]]


def read(sys: Path = Path("/sys"), seconds: float = SECONDS) -> dict[str, int]:
    """Return all counters by name ("mlx5_0 port 1 symbol_error")."""
    until = time.monotonic() + seconds
    out: dict[str, int] = {}
    for name, path, number in _all(sys):
        if time.monotonic() > until:
            break
        try:
            out[name] = number(path.read_text())
        except (OSError, ValueError):
            continue
    return out


def grown(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Return by how much counters have grown that were read both times (pure).

    One that is smaller now was set to zero in between: it says nothing.
    """
    return {name: now[name] - old for name, old in before.items() if now.get(name, old) > old}


def _all(sys: Path) -> Iterator[_Counter]:
    yield from _infiniband(sys / "class/infiniband")
    yield from _ethernet(sys / "class/net")
    yield from _memory(sys / "devices/system/edac/mc")
    yield from _pcie(sys)


def _infiniband(base: Path) -> Iterator[_Counter]:
    for adapter in _entries(base):
        for port in _entries(adapter / "ports"):
            for kind, names in (("counters", LINK_COUNTERS), ("hw_counters", RETRY_COUNTERS)):
                for name in names:
                    yield f"{adapter.name} port {port.name} {name}", port / kind / name, int


def _ethernet(base: Path) -> Iterator[_Counter]:
    for interface in _entries(base):
        virtual = not (interface / "device").exists()
        if interface.name == "lo" or (virtual and (interface / "master").exists()):
            continue  # a container's: it comes and goes with it
        for name in ETHERNET:
            yield f"{interface.name} {name}", interface / "statistics" / name, int
        name = "carrier_down_count"
        yield f"{interface.name} {name}", interface / name, int


def _memory(base: Path) -> Iterator[_Counter]:
    for controller in _entries(base):
        for name, kind in (("ue_count", "uncorrected"), ("ce_count", "corrected")):
            yield f"memory {controller.name} {kind} ECC errors", controller / name, int


def _pcie(sys: Path) -> Iterator[_Counter]:
    used = {}
    for kind in ("nvme", "net", "infiniband"):
        for entry in _entries(sys / "class" / kind):
            used[(entry / "device").resolve().name] = entry.name
    for device in _entries(sys / "bus/pci/devices"):
        known = f" ({used[device.name]})" if device.name in used else ""
        for kind in AER_KINDS:
            yield f"PCIe {device.name}{known} {kind} errors", device / f"aer_dev_{kind}", _aer


def _aer(content: str) -> int:
    return count_aer(parse_aer(content))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []  # no such hardware here
