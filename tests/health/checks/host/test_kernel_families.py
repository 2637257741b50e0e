"""Laws of every family that reads the kernel's log: healthy, forged, unreadable lines."""

from __future__ import annotations

from typing import Any

import pytest
from fake_system import UPTIME, FakeSystem, log
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import EDAC_UE, FAMILIES, HEALTHY, IO, LINK, RESET, SOFT, UE, healthy, run
from pcie_tree import tree

from health.checks.gpu import xid as xid_check
from health.nvidia import xid_lines


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 60.0, 1200.0])
def test_a_healthy_log_is_no_trouble(family: Any, spread: float) -> None:
    assert run(family, FakeSystem(kmsg=healthy(spread))) == []


def test_everything_in_a_healthy_log_once_more_is_no_trouble_either() -> None:
    for family in FAMILIES:
        assert not [f for f in run(family, FakeSystem(kmsg=healthy() * 2)) if f.status == "FAIL"]


# Each begins with the name of a process: 15 characters that a user chooses.
FORGED = [
    ("NVRM: loading N", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
    ("NVRM: loading  ", "invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("NVRM: Xid (PCI:", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("Oops: 0 [#1]", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("Oops: 0 [#1]", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("kernel BUG at a", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("EDAC MC0: 1 UE", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("EXT4-fs error (", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("I/O error, dev ", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("a 0 b: Link down", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
    ("BUG: soft lockup", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
]


@pytest.mark.parametrize(("name", "rest"), FORGED)
def test_a_process_name_forges_nothing(name: str, rest: str) -> None:
    system = FakeSystem(kmsg=log(*[name[:15] + rest] * 20, level=3, time=UPTIME - 500))
    for family in FAMILIES:
        assert run(family, system) == []


def test_a_process_name_does_not_clear_a_fault() -> None:
    fault = "NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=x, Timeout after 6s of waiting"
    forged = "NVRM: loading N[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"
    (found,) = run(xid_check, FakeSystem(kmsg=log(fault, forged, time=UPTIME - 500)))
    assert found.check == "xid-119"


def test_a_log_that_cannot_be_read_is_no_clean_log() -> None:
    for family in FAMILIES:
        with pytest.raises(PermissionError):
            family.CHECK.run(FakeSystem(kmsg=PermissionError(1, "Operation not permitted")))
        assert family.CHECK.closes_on_error


pieces = st.sampled_from(
    [word for line in HEALTHY.splitlines() for word in line.split(" ")]
    + [*IO.split(), *RESET.split(), *SOFT.split(), *LINK.split(), *UE.split(), *EDAC_UE.split()]
    + ["NVRM:", "Xid", "(PCI:0000:3b:00):", "79,", "{1}[Hardware", "Error]:", "event", "severity:"]
)


@given(st.lists(st.one_of(st.text(), st.lists(pieces, max_size=9).map(" ".join)), max_size=20))
def test_no_text_makes_a_check_fail(texts: list[str]) -> None:
    system = FakeSystem(kmsg=log(*texts), **tree())
    for family in FAMILIES:
        for finding in run(family, system):
            assert finding.evidence and "\n" not in finding.evidence


def test_the_prefix_of_the_parser_covers_its_forms() -> None:
    assert all(
        text.startswith(xid_lines.PREFIXES) for text in ("NVRM: Xid (", "nvidia-nvswitch0: SXid")
    )
