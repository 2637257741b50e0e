"""Read this node's error counters: InfiniBand, PCIe (AER), the host's memory, Ethernet.

Only what /sys lets every user read. A counter that is missing or cannot be read says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from robust_slurm.error_counters import (
    AER_KINDS,
    LINK_COUNTERS,
    count_aer,
    parse_aer,
    parse_count,
)

SECONDS = 1.0  # until no more files are opened: reading one asks the device
# Without those that grow in normal work: packets in another order or too fast for the receiver.
RETRIES = ("local_ack_timeout_err",)
ETHERNET = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors", "tx_fifo_errors")

_Counter = tuple[str, Path, Callable[[str], int | None]]
_Entries = Callable[[Path], Iterator[Path]]


def read(sys: Path = Path("/sys"), seconds: float = SECONDS) -> dict[str, int]:
    """Return all counters by name ("mlx5_0 port 1 symbol_error")."""
    until = time.monotonic() + seconds

    def entries(directory: Path) -> Iterator[Path]:
        try:
            found = sorted(directory.iterdir())
        except OSError:
            return  # no such hardware here
        for entry in found:
            if time.monotonic() > until:
                return
            yield entry

    out: dict[str, int] = {}
    for name, path, number in _all(sys, entries):
        if time.monotonic() > until:
            break
        try:
            value = number(path.read_text())
        except (OSError, ValueError):
            continue
        if value is not None:
            out[name] = value
    return out


def _all(sys: Path, entries: _Entries) -> Iterator[_Counter]:
    yield from _infiniband(sys / "class/infiniband", entries)
    yield from _pcie(sys / "bus/pci/devices", entries)
    yield from _memory(sys / "devices/system/edac/mc", entries)
    yield from _ethernet(sys / "class/net", entries)  # there may be thousands


def _infiniband(base: Path, entries: _Entries) -> Iterator[_Counter]:
    for adapter in entries(base):
        for port in entries(adapter / "ports"):
            for kind, names in (("counters", LINK_COUNTERS), ("hw_counters", RETRIES)):
                for name in names:
                    yield f"{adapter.name} port {port.name} {name}", port / kind / name, parse_count


def _pcie(base: Path, entries: _Entries) -> Iterator[_Counter]:
    for device in entries(base):
        if not (device / f"aer_dev_{AER_KINDS[0]}").exists():
            continue
        used = [e.name for kind in ("infiniband", "net", "nvme") for e in entries(device / kind)]
        known = f" ({used[0]})" if used else ""
        for kind in AER_KINDS:
            yield f"PCIe {device.name}{known} {kind} errors", device / f"aer_dev_{kind}", _aer


def _aer(content: str) -> int | None:
    found = parse_aer(content)
    return count_aer(found) if any(name.startswith("TOTAL") for name in found) else None


def _memory(base: Path, entries: _Entries) -> Iterator[_Counter]:
    for controller in entries(base):
        for name, kind in (("ue_count", "uncorrected"), ("ce_count", "corrected")):
            yield f"memory {controller.name} {kind} ECC errors", controller / name, parse_count


def _ethernet(base: Path, entries: _Entries) -> Iterator[_Counter]:
    for interface in entries(base):
        if not (interface / "device").is_symlink():
            continue  # no hardware: a bridge, a container's end
        for name in ETHERNET:
            yield f"{interface.name} {name}", interface / "statistics" / name, parse_count
        name = "carrier_down_count"
        yield f"{interface.name} {name}", interface / name, parse_count
