"""PCIe and NVLink: links against what they should be, and the fabric."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from fake_gpus import PCI, a100, gpu_node, h100, rtx4090
from fake_system import BOOT, NOW, FakeSystem

from health.checks.gpu.gpu_pcie import CHECK as PCIE
from health.checks.gpu.nvlink import CHECK as NVLINK
from health.finding import Finding
from health.node.system import Event

H100 = "NVIDIA H100 80GB HBM3"
X8 = {"width": 8}
WORK = [{"pid": 4711, "kind": "compute"}]


def said(findings: list[Finding]) -> list[str]:
    return [f"{f.check} {f.status} {f.device}".strip() for f in findings]


def pcie(count: int, changes: dict[int, dict[str, Any]], **over: Any) -> FakeSystem:
    devices = [h100(i) for i in range(count)]
    for index, values in changes.items():
        devices[index]["pcie"] |= values
    return gpu_node(devices, **over)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (pcie(8, {3: X8}), ["pcie-width FAIL gpu3"]),
        (pcie(1, {0: X8}), ["pcie-width FAIL gpu0"]),
        (pcie(2, {0: X8}), ["pcie-width FAIL gpu0"]),
        # all slots wired with eight lanes, or all degraded: not for this check to say
        (pcie(2, {0: X8, 1: X8}), ["pcie-width-all WARN gpu0", "pcie-width-all WARN gpu1"]),
        (
            pcie(4, {0: X8, 1: X8, 2: X8, 3: {"width": 4}}),
            [
                "pcie-width-all WARN gpu0",
                "pcie-width-all WARN gpu1",
                "pcie-width-all WARN gpu2",
                "pcie-width FAIL gpu3",
            ],
        ),
        (pcie(2, {0: X8, 1: X8}, options={"gpu_pcie": X8}), []),
        (pcie(1, {0: X8}, options={"gpu_pcie": {"width": 16}}), ["pcie-width FAIL gpu0"]),
        (pcie(1, {0: X8}, fleet={"pcie": {H100: X8}}), []),
        (pcie(1, {0: X8}, fleet={"pcie": {H100: {"width": 16}}}), ["pcie-width FAIL gpu0"]),
        (
            pcie(1, {0: {"width": 8, "max_width": 8}}, fleet={"pcie": {H100: {"width": 16}}}),
            ["pcie-width FAIL gpu0"],
        ),
        # generation: an idle GPU lowers it
        (pcie(1, {0: {"generation": 1}}), []),
        (pcie(8, {3: {"max_generation": 4, "generation": 4}}), ["pcie-uneven WARN gpu3"]),
        (pcie(8, {3: {"max_width": 8, "width": 8}}), ["pcie-uneven WARN gpu3"]),
        (
            pcie(1, {0: {"max_generation": 4}}, options={"gpu_pcie": {"generation": 5}}),
            ["pcie-generation FAIL gpu0"],
        ),
        (
            pcie(1, {0: {"max_generation": 4}}, fleet={"pcie": {H100: {"generation": 5}}}),
            ["pcie-generation FAIL gpu0"],
        ),
        (pcie(1, {0: {"generation": 1}}, options={"gpu_pcie": {"generation": 5}}), []),
        # replays: 24 h up; 8 a minute are allowed
        (pcie(1, {0: {"replays": 8 * 60 * 24}}), []),
        (pcie(1, {0: {"replays": 8 * 60 * 24 + 60}}), ["pcie-replays WARN gpu0"]),
        (
            pcie(1, {0: {"replays": 600}}, history=[Event(NOW - 60, "driver", BOOT, {})]),
            ["pcie-replays WARN gpu0"],
        ),
        (pcie(1, {0: {"replays": 400}}, history=[Event(NOW - 60, "driver", BOOT, {})]), []),
    ],
)
def test_pcie(system: FakeSystem, expected: list[str]) -> None:
    assert said(PCIE.run(system)) == expected


@pytest.mark.parametrize(
    ("throttle", "processes", "found"),
    [(0, WORK, True), (1, WORK, False), (0, [], False), (None, WORK, False)],
)
def test_a_low_generation_counts_only_at_work(
    throttle: int | None, processes: list[Any], found: bool
) -> None:
    device = h100(0) | {"throttle": throttle, "processes": processes}
    if throttle is None:
        del device["throttle"]
    assert PCIE.run(gpu_node([device])) == []
    device["pcie"]["generation"] = 1
    assert [f.check for f in PCIE.run(gpu_node([device]))] == ["pcie-generation-busy"] * found


@pytest.mark.parametrize("width", ["63", "255"])
def test_a_device_that_reads_all_ones_is_gone(width: str) -> None:
    devices = [h100(0), h100(1)]
    devices[1]["pcie"]["width"] = 1
    files = {f"{PCI}/{devices[1]['pci']}/current_link_width": f"{width}\n"}
    found = PCIE.run(gpu_node(devices, files=files))
    assert said(found) == ["pcie-gone FAIL gpu1"] and found[0].action == "reboot"


def test_sysfs_stands_in_where_nvml_does_not_tell_the_width() -> None:
    device = h100(0)
    del device["pcie"], device["errors"]["retired"]
    device["errors"]["pcie"] = "NVML_ERROR_NOT_SUPPORTED"
    place = f"{PCI}/{device['pci']}"
    assert PCIE.run(gpu_node([device])) == []
    narrow = {f"{place}/current_link_width": "4\n"}
    found = PCIE.run(gpu_node([device], files=narrow))
    assert said(found) == ["pcie-width FAIL gpu0"] and "sysfs" in found[0].evidence
    for text in ("0\n", "Unknown\n", ""):
        files = {f"{place}/current_link_width": text}
        assert PCIE.run(gpu_node([device], files=files)) == []


def switched(widths: list[str], count: int = 8, maximum: str = "16") -> FakeSystem:
    """Two GPUs below each switch: GPU - downstream port - upstream port - root port."""
    devices = [h100(i) for i in range(count)]
    files, links = {}, {}
    for i, device in enumerate(devices):
        tree = i // 2
        root, up, down = f"000{tree}:00:01.0", f"000{tree}:01:00.0", f"000{tree}:02:0{i % 2}.0"
        path = f"pci000{tree}:00/{root}/{up}/{down}/{device['pci']}"
        place = f"/sys/devices/{path}"
        links[f"{PCI}/{device['pci']}"] = f"../../../devices/{path}"
        for key, text in (("vendor", "0x10de\n"), ("class", "0x030200\n")):
            files[f"{place}/{key}"] = text
        for port, now in ((root, widths[tree]), (up, widths[tree]), (down, "16"), (None, "16")):
            at = f"{PCI}/{port}" if port else place
            files[f"{at}/current_link_width"] = f"{now}\n"
            files[f"{at}/max_link_width"] = f"{maximum}\n"
    system = gpu_node(devices)
    system.files = {p: t for p, t in system.files.items() if not p.startswith(PCI)} | files
    system.links = {p: t for p, t in system.links.items() if not p.startswith(PCI)} | links
    return system


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        (["16"] * 4, []),
        (["16", "16", "8", "16"], ["pcie-upstream-width FAIL 0002:01:00.0"]),
        (["8"] * 4, [f"pcie-upstream-width WARN 000{n}:01:00.0" for n in range(4)]),
        (["16", "16", "0", "16"], []),
    ],
)
def test_the_links_above_the_switches(widths: list[str], expected: list[str]) -> None:
    found = PCIE.run(switched(widths))
    assert said(found) == expected
    if found:
        assert "gpu4 gpu5" in found[len(found) // 2].evidence


def test_the_least_of_both_ends_is_what_a_link_can_have() -> None:
    system = switched(["8", "8", "8", "8"])
    for tree in range(4):
        system.files[f"{PCI}/000{tree}:00:01.0/max_link_width"] = "8\n"
    assert PCIE.run(system) == []


# --- NVLink


def links(count: int, down: dict[int, list[int]], model: Any = h100, **over: Any) -> FakeSystem:
    devices = [model(i) for i in range(count)]
    for index, numbers in down.items():
        for link in devices[index]["nvlinks"]:
            if link["link"] in numbers:
                link["active"] = False
    return gpu_node(devices, **over)


ALL = list(range(18))


def unlinked(index: int) -> Any:
    return h100(index) | ({"nvlinks": []} if index == 0 else {})


def mig(index: int) -> Any:
    device = unlinked(index)
    return device | ({"mig": True, "mig_pending": True} if index == 0 else {})


def bridged(index: int) -> Any:
    return a100(index) | {"name": "NVIDIA A100 80GB PCIe"}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (links(8, {2: [5]}), ["nvlink-down FAIL gpu2"]),
        (links(8, {2: [5], 3: [5]}), ["nvlink-down FAIL gpu2", "nvlink-down FAIL gpu3"]),
        (links(2, {1: [0]}), ["nvlink-down FAIL gpu1"]),
        (links(8, dict.fromkeys(range(8), ALL)), ["nvlink-all-down FAIL"]),
        (links(8, dict.fromkeys(range(8), ALL), a100), ["nvlink-all-down FAIL"]),
        (links(1, {0: [3]}), []),  # nothing to compare with
        (links(1, {0: [3]}, options={"nvlink": {"links": 18}}), ["nvlink-down FAIL gpu0"]),
        (links(1, {0: [3]}, fleet={"nvlinks": {H100: 18}}), ["nvlink-down FAIL gpu0"]),
        (links(8, {2: [5]}, options={"nvlink": {"links": 17}}), []),
        (links(8, {2: [5]}, fleet={"nvlinks": {H100: 17}}), []),
        (links(8, {2: [5]}, options={"nvlink": {"links": 0}}), []),
        (links(1, {0: ALL}), []),
        # the driver gave all links of one board up; with MIG it uses none
        (links(8, {2: [5]}, unlinked), ["nvlink-down FAIL gpu0", "nvlink-down FAIL gpu2"]),
        (links(8, {}, mig), []),
        (links(1, {}, unlinked, options={"nvlink": {"links": 18}}), ["nvlink-down FAIL gpu0"]),
        (links(1, {}, unlinked, fleet={"nvlinks": {H100: 18}}), ["nvlink-down FAIL gpu0"]),
        # PCIe boards: bridges may join some of them only
        (links(8, dict.fromkeys(range(8), ALL), bridged), []),
        (links(4, {2: ALL, 3: ALL}, bridged), []),
        (links(4, {3: [1]}, bridged), ["nvlink-fewer WARN gpu3"]),
        (links(4, {3: [1]}, bridged, options={"nvlink": {"links": 12}}), ["nvlink-down FAIL gpu3"]),
        (gpu_node([rtx4090(0), rtx4090(1)]), []),
    ],
)
def test_active_links(system: FakeSystem, expected: list[str]) -> None:
    assert said(NVLINK.run(system)) == expected


def test_the_evidence_names_the_links() -> None:
    found = NVLINK.run(links(8, {2: [5, 7]}))
    assert "16 NVLinks active, expected 18" in found[0].evidence and "5,7" in found[0].evidence


@pytest.mark.parametrize(
    ("errors", "hours", "expected"),
    [
        ({}, 24, []),
        ({"replay": 100}, 24, []),
        ({"replay": 101}, 24, ["WARN nvlink-errors"]),
        ({"replay": 60 * 24}, 24, ["WARN nvlink-errors"]),
        ({"replay": 61 * 24}, 24, ["FAIL nvlink-replays"]),
        ({"recovery": 61}, 1, ["FAIL nvlink-replays"]),
        ({"recovery": 61}, 0.01, ["FAIL nvlink-replays"]),
        ({"recovery": 59}, 0.01, []),  # an hour at least
        ({"replay": 40, "recovery": 40}, 1, ["FAIL nvlink-replays"]),
        ({"bad": 61}, 1, ["FAIL nvlink-replays"]),
        ({"crc_flit": 10_000}, 1, ["WARN nvlink-errors"]),
        ({"crc_flit": 101 * 3600}, 1, ["FAIL nvlink-crc"]),
        ({"crc_flit": 60 * 3600, "crc_data": 60 * 3600}, 1, ["FAIL nvlink-crc"]),
        ({"fatal": 1}, 24, ["FAIL nvlink-fatal"]),
    ],
)
def test_link_errors(errors: dict[str, int], hours: float, expected: list[str]) -> None:
    devices = [h100(0), h100(1)]
    devices[1]["nvlinks"][7]["errors"] |= errors
    history = [Event(NOW - hours * 3600, "reset", BOOT, {"gpu": "gpu1"})]
    found = NVLINK.run(gpu_node(devices, history=history))
    assert [f"{f.status} {f.check}" for f in found] == expected
    for finding in found:
        assert finding.device == "gpu1" and "link 7" in finding.evidence


def mask(**fields: int) -> int:
    shifts = {"bandwidth": 0, "recovery": 2, "route": 4, "timeout": 6, "setup": 8}
    return sum(value << shifts[key] for key, value in fields.items())


GOOD = mask(bandwidth=2, recovery=2, route=2, timeout=2, setup=1)


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        ({"state": "not_supported", "status": "NVML_ERROR_NOT_SUPPORTED"}, []),
        ({"state": "completed", "status": "NVML_SUCCESS"}, []),
        ({"state": "completed", "status": "NVML_SUCCESS", "health": GOOD}, []),
        ({"state": "completed", "status": "NVML_SUCCESS", "health": 0}, []),
        (
            {"state": "not_started", "status": "NVML_SUCCESS"},
            ["fabric-not-ready restart-fabric-manager"],
        ),
        (
            {"state": "in_progress", "status": "NVML_SUCCESS"},
            ["fabric-not-ready restart-fabric-manager"],
        ),
        ({"state": "9", "status": "NVML_SUCCESS"}, ["fabric-not-ready restart-fabric-manager"]),
        (
            {"state": "completed", "status": "NVML_ERROR_UNKNOWN"},
            ["fabric-failed restart-fabric-manager"],
        ),
        ({"state": "completed", "health": mask(bandwidth=1)}, ["fabric-unhealthy reset-gpu"]),
        (
            {"state": "completed", "health": mask(route=1, timeout=1)},
            ["fabric-unhealthy reset-gpu"],
        ),
        ({"state": "completed", "health": mask(setup=5)}, ["fabric-misconfigured service"]),
        ({"state": "completed", "health": mask(setup=15)}, ["fabric-misconfigured service"]),
    ],
)
def test_fabric(fabric: dict[str, Any], expected: list[str]) -> None:
    devices = [h100(i) for i in range(8)]
    devices[6]["fabric"] = fabric
    found = NVLINK.run(gpu_node(devices))
    assert [f"{f.check} {f.action}" for f in found] == expected
    assert all(f.device == "gpu6" and f.status == "FAIL" for f in found)


SWITCH = {"/proc/driver/nvidia-nvswitch/devices/0000:05:00.0": ""}
PID = {"/run/nvidia-fabricmanager/nv-fabricmanager.pid": "812\n"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        (SWITCH, True),
        (SWITCH | PID, True),
        (SWITCH | PID | {"/proc/812/comm": "sshd\n"}, True),
        (SWITCH | PID | {"/proc/812/comm": "nv-fabricmanage\n"}, False),
        (SWITCH | {"/proc/9/comm": "nv-fabricmanage\n"}, False),  # in a container: no pid file
        (
            SWITCH
            | {
                "/run/nvidia-fabricmanager/nv-fabricmanager.pid": "../1\n",
                "/1/comm": "nv-fabricmanage\n",
            },
            True,
        ),
    ],
)
def test_fabric_manager(files: dict[str, Any], found: bool) -> None:
    system = gpu_node([a100(0), a100(1)], files=files)
    expected = ["fabric-manager-down FAIL"] if found else []
    assert said(NVLINK.run(system)) == expected


def test_processes_that_cannot_be_listed_say_nothing_about_the_fabric_manager() -> None:
    system = gpu_node([a100(0), a100(1)], files=SWITCH)
    system.fail["/proc"] = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(OSError, match="Too many open files"):
        NVLINK.run(system)
