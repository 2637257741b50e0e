"""Mixes of faults and their rates, as published. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

from bench.simulate.events import WISH, Kind

# ByteRobust, table 1: 55,365 incidents of 778,135 jobs.
EXPLICIT = {
    "CUDA error": 19968,
    "CPU overload": 6095,
    "CPU OOM": 5567,
    "disk space": 2755,
    "InfiniBand error": 1599,
    "filesystem mount": 1176,
    "HDFS error": 1104,
    "container error": 781,
    "OS kernel panic": 203,
    "GPU memory error": 188,
    "external service": 128,
    "GPU unavailable": 76,
    "disk fault": 47,
}
IMPLICIT = {"job hang": 5506, "MFU decline": 442, "NaN value": 148}
MANUAL = {"code/data adjustment": 9582}

# Of the incidents that one of the two ended, restarts in place ended 22.70 of 55.22 (ByteRobust:
# direct evictions 32.52 %, reattempts 22.70 %). So where no evidence names a machine:
BAD = round(32.52 / (32.52 + 22.70), 2)
HANG_INFRA = round(21 / 26, 2)  # of the hangs of 2,000 GPUs and more; the rest is code
_SHOWS = {
    "InfiniBand error": ("nic", BAD, True),
    "filesystem mount": ("mount", 1.0, True),
    "OS kernel panic": ("node", 1.0, True),
    "GPU memory error": ("gpu", 1.0, True),
    "GPU unavailable": ("gpu", 1.0, True),
    "disk fault": ("node", 1.0, True),
    "disk space": ("exit", 0.0, False),
    "HDFS error": ("exit", 0.0, False),
    "container error": ("exit", 0.0, False),
    "external service": ("exit", 0.0, False),
    "job hang": ("hang", HANG_INFRA, False),
    "MFU decline": ("slow", 1.0, True),
    "NaN value": ("nan", 0.75, False),
    "code/data adjustment": (WISH, 0.0, False),
}


def _kinds(counts: Mapping[str, int], events: float, node_days: float) -> list[Kind]:
    """Share ``events`` by ``counts``. Hangs, which code causes as well, have a share for it."""
    total = sum(counts.values())
    found = []
    for name, count in counts.items():
        shows, machine, named = _SHOWS.get(name, ("exit", BAD, False))
        code = 1.0 - HANG_INFRA if name == "job hang" else 0.0
        rate = 1000.0 * events * count / total / node_days
        found.append(Kind(name, shows, rate, machine, code, named))
    return found


def _byterobust(
    explicit: float, manual: float, implicit: float, back: float, days: float
) -> tuple[Kind, ...]:
    """Table 4, of 1,200 machines; 1 % of the explicit faults take a switch with 32 machines."""
    node_days = 1200 * days
    return (
        *_kinds(EXPLICIT, 0.99 * explicit, node_days),
        Kind("switch", "node", 10.0 * explicit / node_days, 1.0, 0.0, True, 32),
        *_kinds(IMPLICIT, implicit, node_days),
        *_kinds(MANUAL, manual, node_days),
        Kind("bad code", "exit", 1000.0 * back / node_days, 0.0, 1.0),
    )


def _rated(rate: float, counts: Mapping[str, tuple[float, str, float, bool]]) -> tuple[Kind, ...]:
    """Share a rate per 1,000 node-days by counts."""
    total = sum(count for count, *_ in counts.values())
    return tuple(
        Kind(name, shows, rate * count / total, machine, 0.0, named)
        for name, (count, shows, machine, named) in counts.items()
    )


# Llama 3 (arXiv 2407.21783), table 5, and its 47 planned stops; 2,048 nodes, 54 days.
_LLAMA = {
    "faulty GPU": (148, "gpu", 1.0, True),
    "HBM3 memory": (72, "gpu", 1.0, True),
    "software bug": (54, "exit", 0.0, False),
    "switch or cable": (35, "nic", BAD, True),
    "host maintenance": (32, "node", 1.0, True),
    "GPU SRAM or processor": (36, "gpu", 1.0, True),
    "NIC": (7, "nic", 1.0, True),
    "NCCL watchdog": (7, "hang", BAD, False),
    "silent data corruption": (6, "nan", 1.0, False),
    "host hardware": (22, "node", 1.0, True),
}
# Causes of lemon nodes (arXiv 2410.21680), in percent; EUD's findings are GPUs here.
_RSC = {
    "GPU": (28.2 + 10.3, "gpu", 1.0, True),
    "memory, BIOS, power": (20.5 + 7.7 + 5.1, "node", 1.0, True),
    "PCIe": (15.4, "exit", 1.0, False),
    "NIC, optics": (7.7 + 2.6, "nic", BAD, True),
}
_PLANNED = Kind("planned stop", WISH, 1000.0 * 47 / (2048 * 54))

MIXES: Mapping[str, tuple[str, tuple[Kind, ...]]] = {
    "byterobust": (
        "ByteRobust's dense job (table 4), shared by its table 1",
        _byterobust(128, 20, 15, 12, 90.0),
    ),
    "byterobust-moe": (
        "ByteRobust's MoE job (table 4), shared by its table 1",
        _byterobust(71, 31, 9, 14, 30.0),
    ),
    "llama3": ("Llama 3 405B (table 5)", (*_rated(3.79, _LLAMA), _PLANNED)),
    "rsc-1": ("Meta's RSC-1, 6.5 per 1,000 node-days", _rated(6.5, _RSC)),
    "rsc-2": ("Meta's RSC-2, 2.34 per 1,000 node-days", _rated(2.34, _RSC)),
}


def scaled(mix: tuple[Kind, ...], factor: float) -> tuple[Kind, ...]:
    """Return the mix with all rates times ``factor``."""
    return tuple(kind._replace(per_1000=kind.per_1000 * factor) for kind in mix)
