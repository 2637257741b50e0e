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


@pytest.mark.parametrize(
    "line",
    [
        # A process that is called "EDAC MC0: 1 UE ", with a program called "x on y (z)".
        "EDAC MC0: 1 UE [4711]: segfault at 0 ip 0 sp 0 error 6 in x on y (z)[401000,1000]",
        "EDAC MC0: 1 UE  invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
        "Memory failure: invoked oom-killer: due to hardware memory corruption",
    ],
)
def test_a_process_can_call_itself_like_a_message(line: str) -> None:
    assert run(machine_check, FakeSystem(kmsg=log(line, time=500.0))) == []


@pytest.mark.parametrize("label", ["on mc#0csrow#1", "memory read error on CPU_SrcID#0_DIMM#0"])
def test_every_form_of_edac_counts(label: str) -> None:
    line = f"EDAC MC0: 1 UE {label} (channel:0 slot:0 page:0x0)"
    found = run(machine_check, FakeSystem(kmsg=log(line, time=500.0)))
    assert [one.check for one in found] == ["mce-uncorrected"]


def test_the_limits_of_machine_checks_are_settings() -> None:
    options = {"machine_check": {"corrected": 2, "storm": 3}}
    for times, check in ((1, []), (2, ["mce-corrected"]), (3, ["mce-corrected-storm"])):
        system = FakeSystem(kmsg=log(*[CE] * times, time=UPTIME - 99), options=options)
        assert [f.check for f in run(machine_check, system)] == check
