"""The topology family: where GPUs and adapters are, against the fleet's record."""

from __future__ import annotations

from typing import Any

import pytest
from fake_host import ids
from fake_system import FakeSystem

from health.checks.gpu import topology

PCI = "/sys/bus/pci/devices"
MODEL = "DGXH100"
# address: (NUMA node, the bridges above)
DEVICES = {
    "0000:1b:00.0": (0, "pci0000:15/0000:15:01.0/0000:16:00.0"),
    "0000:43:00.0": (0, "pci0000:3d/0000:3d:01.0/0000:3e:00.0"),
    "0000:9d:00.0": (1, "pci0000:97/0000:97:01.0/0000:98:00.0"),
    "0000:18:00.0": (0, "pci0000:15/0000:15:01.0/0000:16:00.0"),
    "0000:40:00.0": (0, "pci0000:3d/0000:3d:01.0/0000:3e:00.0"),
    "0000:9a:00.0": (1, "pci0000:97/0000:97:05.0/0000:99:00.0"),  # only the host bridge in common
}
ADAPTERS = {"mlx5_0": "0000:18:00.0", "mlx5_1": "0000:40:00.0", "mlx5_2": "0000:9a:00.0"}
RECORD = {
    "processors": "0-1",
    "numa": {"gpu0": 0, "gpu1": 0, "gpu2": 1, "mlx5_0": 0, "mlx5_1": 0, "mlx5_2": 1},
    "nearest": {"gpu0": ["mlx5_0"], "gpu1": ["mlx5_1"], "gpu2": ["mlx5_2"]},
}


def node(
    devices: dict[str, tuple[int, str]],
    record: Any = RECORD,
    adapters: dict[str, str] = ADAPTERS,
    processors: str = "0-1",
    model: str = MODEL,
) -> FakeSystem:
    files = {"/sys/devices/system/node/has_cpu": f"{processors}\n"}
    files["/sys/class/dmi/id/product_name"] = f"{model}\n"
    links = {}
    for address, (numa, above) in devices.items():
        place = f"/sys/devices/{above}/{address}"
        links[f"{PCI}/{address}"] = f"../../../devices/{above}/{address}"
        files[f"{place}/numa_node"] = f"{numa}\n"
        if address not in ADAPTERS.values():
            files[f"/proc/driver/nvidia/gpus/{address}/information"] = "Model: NVIDIA H100\n"
    for name, address in adapters.items():
        links[f"/sys/class/infiniband/{name}/device"] = f"../../../{address}"
    return FakeSystem(files, links=links, fleet={"topology": {MODEL: record}} if record else {})


def test_what_is_observed_is_what_is_recorded() -> None:
    assert topology.observe(node(DEVICES)) == {MODEL: RECORD}
    assert topology.CHECK.run(node(DEVICES)) == []


def test_a_node_without_gpus_or_adapters() -> None:
    assert topology.observe(FakeSystem()) == {}
    gpus = {address: row for address, row in DEVICES.items() if address not in ADAPTERS.values()}
    assert topology.observe(node(gpus, adapters={}))[MODEL]["nearest"]["gpu0"] == []


def test_without_a_record_nothing_is_looked_at() -> None:
    system = node(DEVICES, record=None)
    assert topology.CHECK.run(system) == [] and set(system.asked) == {"fleet"}


def moved(**changes: tuple[int, str]) -> dict[str, tuple[int, str]]:
    return DEVICES | {f"0000:{bus[1:]}:00.0": place for bus, place in changes.items()}


@pytest.mark.parametrize(
    ("changed", "found", "said"),
    [
        ({"devices": moved(b18=(1, DEVICES["0000:18:00.0"][1]))}, ["topology-numa"],
         "mlx5_0 at 1, 0 recorded"),
        ({"devices": moved(b18=(-1, DEVICES["0000:18:00.0"][1]))}, [], ""),
        # Two adapters changed places: their names stay, what they are near to does not.
        ({"adapters": {**ADAPTERS, "mlx5_0": ADAPTERS["mlx5_1"], "mlx5_1": ADAPTERS["mlx5_0"]}},
         ["topology-adapters"], "gpu0: mlx5_1, mlx5_0 recorded"),
        ({"devices": moved(b40=(1, DEVICES["0000:9d:00.0"][1]))}, [
            "topology-numa", "topology-adapters"], "mlx5_1 at 1, 0 recorded"),
        ({"adapters": {**ADAPTERS, "mlx5_9": ADAPTERS["mlx5_0"]}}, [], ""),  # a virtual function
        ({"processors": "0-7"}, ["topology-processors"], "0-7, 0-1 recorded"),
        ({"processors": ""}, [], ""),
        ({"model": "another"}, [], ""),
        # An adapter is missing: the family infiniband says so.
        ({"adapters": {k: v for k, v in ADAPTERS.items() if k != "mlx5_1"}}, [], ""),
        # A GPU is: all that come after it have another number.
        ({"devices": {k: v for k, v in DEVICES.items() if k != "0000:1b:00.0"}}, [], ""),
        ({"record": {}}, [], ""),
        ({"record": {"numa": [], "nearest": {"gpu0": 7}, "processors": 3}}, [], ""),
        ({"record": "odd"}, [], ""),
    ],
)  # fmt: skip
def test_against_the_record(changed: dict[str, Any], found: list[str], said: str) -> None:
    told = topology.CHECK.run(node(**{"devices": DEVICES, **changed}))
    assert ids(told) == [("WARN", name, "") for name in found]
    assert all(said in finding.evidence for finding in told[:1])


def test_many_that_moved_are_one_finding() -> None:
    far = {address: (3, above) for address, (_, above) in DEVICES.items()}
    [finding] = topology.CHECK.run(node(far))
    assert finding.check == "topology-numa" and finding.evidence.count("recorded") == 3
    assert "and 3 more" in finding.evidence
