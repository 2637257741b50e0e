"""PCIe errors: the kernel's log and the counters in sysfs."""

from __future__ import annotations

import pytest
from fake_system import FakeSystem, log
from kernel_lines import ghes, run, told
from pcie_tree import BOARD, DISK, GPU, NIC, ROOT, SWITCH, tree

from health.checks.host import pcie_aer
from robust_slurm.error_counters import count_aer, parse_aer


def aer(device: str, severity: str, driver: str = "nvidia") -> str:
    return f"{driver} {device}: PCIe Bus Error: severity={severity}, type=Data Link Layer, (x)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([aer(GPU, "Uncorrected (Fatal)")], [("aer-fatal", GPU)]),
        ([aer(NIC, "Uncorrectable (Fatal)", "mlx5_core")], [("aer-fatal", "mlx5_0")]),
        ([aer(DISK, "Uncorrected (Fatal)", "nvme")], [("aer-fatal", "nvme0")]),
        ([aer(SWITCH, "Uncorrected (Fatal)", "pcieport")], [("aer-fatal", SWITCH)]),
        ([aer(ROOT, "Uncorrected (Fatal)", "pcieport")], [("aer-fatal", ROOT)]),
        ([aer(BOARD, "Uncorrected (Fatal)", "igb")], [("aer-fatal-other", BOARD)]),
        ([aer("0000:99:00.0", "Uncorrected (Fatal)")], [("aer-fatal", "0000:99:00.0")]),
        ([aer(GPU, "Uncorrected (Non-Fatal)")], [("aer-nonfatal", GPU)]),
        ([aer(BOARD, "Uncorrected (Non-Fatal)", "igb")], []),
        ([aer(GPU, "Corrected")] * 50, []),
        ([aer(GPU, "Correctable")] * 2400, [("aer-corrected", GPU)]),
        (
            [f"pcieport {ROOT}: AER: Uncorrectable (Fatal) error message received from {GPU}"],
            [("aer-fatal", GPU)],
        ),
        (
            [f"pcieport {ROOT}: AER: Multiple Uncorrected (Non-Fatal) error received: {GPU}"],
            [("aer-nonfatal", GPU)],
        ),
        ([f"pcieport {ROOT}: DPC: containment event, status:0x1f01 source:0x0000"],
         [("aer-fatal", ROOT)]),
        (
            [*ghes("recoverable", "PCIe error")[1:4], f"{{1}}[Hardware Error]:   device_id: {GPU}"],
            [("aer-nonfatal", GPU)],
        ),
        (
            [*ghes("fatal", "PCIe error")[1:4], f"{{1}}[Hardware Error]:   device_id: {GPU}"],
            [("aer-fatal", GPU)],
        ),
        ([*ghes("fatal", "memory error"), f"{{1}}[Hardware Error]:   device_id: {GPU}"], []),
        ([f"nvidia {GPU}: AER: can't recover (no error_detected callback)"], []),
    ],
)  # fmt: skip
def test_pcie_errors_of_the_log(lines: list[str], expected: list[tuple[str, str]]) -> None:
    system = FakeSystem(**tree(), kmsg=log(*lines, time=500.0))
    assert told(run(pcie_aer, system)) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, []),
        ({"gpu_fatal": "DLP 1"}, [("aer-fatal", GPU)]),
        ({"gpu_nonfatal": "UnsupReq 7"}, []),
        ({"gpu_nonfatal": "UnsupReq 7,CmpltTO 1"}, [("aer-nonfatal", GPU)]),
        ({"nic_nonfatal": "CmpltTO 100"}, [("aer-nonfatal-many", "mlx5_0")]),
        ({"disk_correctable": "RxErr 2399"}, []),
        ({"disk_correctable": "RxErr 2400"}, [("aer-corrected", "nvme0")]),
        ({"switch_correctable": "BadTLP 2400"}, [("aer-corrected", SWITCH)]),
    ],
)
def test_pcie_errors_of_the_counters(
    counts: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert told(run(pcie_aer, FakeSystem(**tree(**counts)))) == expected


def test_the_same_pcie_error_is_counted_once() -> None:
    lines = [
        f"pcieport {ROOT}: AER: Uncorrected (Non-Fatal) error received: {GPU}",
        aer(GPU, "Uncorrected (Non-Fatal)"),
    ]
    (found,) = run(pcie_aer, FakeSystem(**tree(gpu_nonfatal="CmpltTO 1"), kmsg=log(*lines)))
    assert found.evidence.startswith("1 x, ")


def test_a_port_says_what_is_below() -> None:
    (found,) = run(pcie_aer, FakeSystem(**tree(switch_fatal="DLP 1")))
    assert f"the port above gpu {GPU}" in found.evidence


def test_a_node_without_any_of_it() -> None:
    assert run(pcie_aer, FakeSystem()) == []


def test_counters_in_an_unknown_form_are_no_errors() -> None:
    assert parse_aer("") == {}
    assert count_aer(parse_aer("DLP x\n\nTOTAL_ERR_FATAL -1\n")) == 0
