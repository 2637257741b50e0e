"""Machine checks and memory errors in the kernel's log."""

from __future__ import annotations

import pytest
from fake_system import UPTIME, FakeSystem, log
from kernel_lines import AMD_CE, AMD_UE, CE, EDAC_CE, EDAC_UE, POISON, UE, UE_EXCEPTION, ghes, run

from health.checks.host import machine_check


@pytest.mark.parametrize(
    ("lines", "at", "expected"),
    [
        ([UE], 500.0, ["mce-uncorrected"]),
        ([UE_EXCEPTION], 500.0, ["mce-uncorrected"]),
        ([UE], 4.2, ["mce-previous-boot"]),
        ([AMD_UE], 500.0, ["mce-uncorrected"]),
        ([EDAC_UE], 500.0, ["mce-uncorrected"]),
        ([POISON], 500.0, ["mce-uncorrected"]),
        (["Memory failure: 0x40fa6: recovery action for free buddy page: Recovered"], 500.0, []),
        (ghes("recoverable", "memory error"), 500.0, ["mce-uncorrected"]),
        (ghes("fatal", "general processor error"), 500.0, ["mce-uncorrected"]),
        (ghes("corrected", "memory error"), 500.0, []),
        (ghes("fatal", "PCIe error"), 500.0, []),
        (ghes("fatal", "memory error", ""), 4.0, ["mce-previous-boot"]),
        (ghes("fatal", "PCIe error", ""), 4.0, ["mce-previous-boot"]),
        ([CE] * 9, UPTIME - 500, []),
        ([CE] * 10, UPTIME - 500, ["mce-corrected"]),
        ([CE] * 10, 4.0, []),
        ([CE] * 10, UPTIME - 4000, []),
        ([AMD_CE] * 10, UPTIME - 500, ["mce-corrected"]),
        ([EDAC_CE] * 5, UPTIME - 500, ["mce-corrected"]),
        ([CE, EDAC_CE.replace("2 CE", "1 CE")] * 6, UPTIME - 500, []),  # told twice, counted once
        ([EDAC_CE.replace("2 CE", "1000 CE")], UPTIME - 500, ["mce-corrected-storm"]),
        (["mce: [Hardware Error]: Machine check events logged"] * 50, UPTIME - 500, []),
    ],
)
def test_machine_checks(lines: list[str], at: float, expected: list[str]) -> None:
    system = FakeSystem(kmsg=log(*lines, time=at))
    assert [f.check for f in run(machine_check, system)] == expected


def test_the_limits_of_machine_checks_are_settings() -> None:
    options = {"machine_check": {"corrected": 2, "storm": 3}}
    for times, check in ((1, []), (2, ["mce-corrected"]), (3, ["mce-corrected-storm"])):
        system = FakeSystem(kmsg=log(*[CE] * times, time=UPTIME - 99), options=options)
        assert [f.check for f in run(machine_check, system)] == check
