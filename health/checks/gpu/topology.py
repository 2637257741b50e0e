"""The adapters and processors near to each GPU, against the fleet's record.

A board in the wrong slot, a riser that is cabled otherwise or a firmware setting (NPS, SNC) leaves
every device well and the node slow: ranks are bound, and NCCL chooses adapters, by these distances.
Devices that are missing are the matter of other families.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from health.check import Check, Condition
from health.finding import Finding
from health.node.ibports import BASE as RDMA
from health.node.sysfs import fleet, link, names, number, text
from health.node.system import System
from health.nvidia.gpus import PCI

PROCESSORS = Condition(
    "topology-processors",
    "WARN",
    "node",
    "none",
    "the NUMA nodes with processors differ from the fleet's record for this server model",
)
NUMA = Condition(
    "topology-numa",
    "WARN",
    "node",
    "none",
    "GPUs or RDMA adapters are at another NUMA node than the fleet recorded",
)
NEAREST = Condition(
    "topology-adapters",
    "WARN",
    "node",
    "none",
    "an adapter recorded as the nearest to a GPU on the PCIe tree is farther away than another",
)

_GPUS = "/proc/driver/nvidia/gpus"
_PRODUCT = "/sys/class/dmi/id/product_name"
_PROCESSORS = "/sys/devices/system/node/has_cpu"


def observe(system: System) -> dict[str, Any]:
    """{model of server: {"processors": "0-1", "numa": {device: node}, "nearest": {gpu: adapters}}}.

    A NUMA node that the firmware does not tell (-1) is left out; GPUs are numbered as on the bus.
    Empty where there is no GPU.
    """
    gpus = {f"gpu{index}": name for index, name in enumerate(names(system, _GPUS))}
    adapters = {}
    for name in names(system, RDMA):
        address = link(system, f"{RDMA}/{name}/device").rpartition("/")[2]
        if address:
            adapters[name] = address
    if not gpus:
        return {}
    numa = {}
    for name, address in (gpus | adapters).items():
        node = number(system, f"{PCI}/{address}/numa_node")
        if node is not None and node >= 0:
            numa[name] = node
    places = {name: _bridges(system, address) for name, address in (gpus | adapters).items()}
    near = {}
    for gpu in gpus:
        shared = {name: _shared(places[gpu], places[name]) for name in adapters}
        most = max(shared.values(), default=0)
        near[gpu] = [name for name, bridges in shared.items() if most and bridges == most]
    found = {"processors": text(system, _PROCESSORS), "numa": numa, "nearest": near}
    return {text(system, _PRODUCT): found}


def _bridges(system: System, address: str) -> list[str]:
    """The way to a device: its host bridge first, then the ports above it."""
    return [part for part in link(system, f"{PCI}/{address}").split("/") if ":" in part][:-1]


def _shared(one: list[str], other: list[str]) -> int:
    """The number of bridges that two ways have in common, from the host bridge on."""
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


def judge(
    here: Mapping[str, Any], recorded: Mapping[str, Any], adapters: Set[str]
) -> list[Finding]:
    """Findings on differences, for devices in both; ``adapters``: those that are here. Pure."""
    near = here["nearest"]
    numa_then, near_then = _table(recorded, "numa", int), _table(recorded, "nearest", list)
    if near.keys() != near_then.keys():
        return []  # another kind of node, or GPUs are missing: their numbers mean nothing
    then = recorded.get("processors")
    if then and here["processors"] and here["processors"] != then:
        said = f"NUMA nodes with processors: {here['processors']}, {then} recorded"
        return [PROCESSORS.found(f"{said} ({_PROCESSORS}); NPS or SNC in the firmware?")]
    found = []
    moved = [
        f"{name} at {node}, {numa_then[name]} recorded"
        for name, node in here["numa"].items()
        if name in numa_then and numa_then[name] != node
    ]
    if moved:
        found.append(NUMA.found(f"NUMA node of {_few(moved)} (fleet topology)"))
    if {name for nearest in near_then.values() for name in nearest} <= adapters:
        # Else one is missing, and the next one may be the nearest in its place.
        other = [
            f"{gpu}: {_words(mine)}, {_words(near_then[gpu])} recorded"
            for gpu, mine in near.items()
            if not set(near_then[gpu]) <= set(mine)  # more of them: virtual functions
        ]
        if other:
            found.append(NEAREST.found(f"nearest to {_few(other)} (fleet topology)"))
    return found


def _table(recorded: Mapping[str, Any], key: str, kind: type) -> dict[str, Any]:
    """A table of the record, without values that a hand may have spoilt."""
    value = recorded.get(key)
    rows = value.items() if isinstance(value, Mapping) else ()
    return {name: row for name, row in rows if isinstance(row, kind)}


def _words(adapters: list[str]) -> str:
    return " ".join(adapters) or "none"


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return "; ".join(items[:3]) + more


def run(system: System) -> list[Finding]:
    """Findings against the record of this model of server; none without a record."""
    recorded = fleet(system).get("topology")
    if not isinstance(recorded, Mapping) or not recorded:
        return []
    found = []
    for product, here in observe(system).items():
        if isinstance(recorded.get(product), Mapping):
            found += judge(here, recorded[product], set(names(system, RDMA)))
    return found


CHECK = Check(
    "topology",
    run,
    (PROCESSORS, NUMA, NEAREST),
    {},
    where=frozenset({"sweep", "deep"}),
    closes_on_error=False,
    cost_ms=2.0,
)
