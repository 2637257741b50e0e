"""Special facts of a slow node's hardware and load, and when the node is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from srun_wrapper.detect.slow_facts import Facts, Seen, corroborated, facts_of, of_any
from srun_wrapper.locate.slow import Slow
from srun_wrapper.protocol.looking_messages import STOLEN, SWAPPED, THROTTLED, Machine

HOT = ("coretemp Package id 0: 100 °C, limit 100 °C",)
NARROW = ("PCIe 0000:17:00.0 (mlx5_0): x8 of x16",)
NODES = 5
IB50, IB200, IB400 = (Machine(links={"ib0": rate}) for rate in (50.0, 200.0, 400.0))
BUSY = Machine(load={"CPU": 60.0})


def seen(
    mine: Machine,
    others: Machine | None = None,
    before: Mapping[str, int] | None = None,
    errors: tuple[int, int] = (0, 0),
) -> dict[str, Seen]:
    """Node n0 and four others; ``errors``: symbol errors of it and of each other one."""
    first = Machine(counts=dict(before or {}))
    other = others or Machine()
    rest = {f"n{n}": Seen(first, other, {"symbol_error": errors[1]}) for n in range(1, NODES)}
    return {"n0": Seen(first, mine, {"symbol_error": errors[0]})} | rest


def counts(**grown: int) -> Machine:
    names = {"throttled": THROTTLED, "swapped": SWAPPED, "stolen": STOLEN}
    return Machine(counts={names[name]: 1000 + more for name, more in grown.items()})


ZERO = {THROTTLED: 1000, SWAPPED: 1000, STOLEN: 1000}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {  # lines about hardware, and about load
    "nothing": ({"mine": Machine()}, 0, 0),
    "hot": ({"mine": Machine(hot=HOT)}, 1, 0),
    "all are hot": ({"mine": Machine(hot=HOT), "others": Machine(hot=HOT)}, 0, 0),
    "a narrow link": ({"mine": Machine(below=NARROW)}, 1, 0),
    "these machines have it": (
        {"mine": Machine(below=NARROW), "others": Machine(below=NARROW)}, 0, 0
    ),
    "a slow link": ({"mine": IB50, "others": IB200}, 1, 0),
    "a link that was as slow when the job began": (
        {"mine": Machine(links={"ib0": 50.0}, first_links={"ib0": 50.0}), "others": IB200}, 0, 0
    ),
    "a link that has become slow": (
        {"mine": Machine(links={"ib0": 50.0}, first_links={"ib0": 200.0}), "others": IB200}, 1, 0
    ),
    "a link that others have not": ({"mine": IB50}, 0, 0),
    "a faster link": ({"mine": IB400, "others": IB200}, 0, 0),
    "throttled": ({"mine": counts(throttled=70), "before": ZERO}, 1, 0),
    "throttled once": ({"mine": counts(throttled=1), "before": ZERO}, 0, 0),
    "all are throttled": (
        {"mine": counts(throttled=70), "others": counts(throttled=50), "before": ZERO}, 0, 0
    ),
    "throttled long ago": ({"mine": counts(throttled=0), "before": ZERO}, 0, 0),
    "a counter that was never read before": ({"mine": counts(throttled=70)}, 0, 0),
    "errors of a link": ({"mine": Machine(), "errors": (50, 1)}, 1, 0),
    "one error of a link": ({"mine": Machine(), "errors": (1, 0)}, 0, 0),
    "errors everywhere": ({"mine": Machine(), "errors": (50, 40)}, 0, 0),
    "swaps": ({"mine": counts(swapped=5000), "before": ZERO}, 0, 1),
    "swaps a little": ({"mine": counts(swapped=50), "before": ZERO}, 0, 0),
    "a busy hypervisor": ({"mine": counts(stolen=5000), "before": ZERO}, 0, 1),
    "others use its CPU": ({"mine": BUSY, "others": Machine(load={"CPU": 2})}, 0, 1),
    "all wait for the CPU": (
        {"mine": BUSY, "others": Machine(load={"CPU": 50})}, 0, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_special(case: str) -> None:
    given, hardware, load = CASES[case]
    found = facts_of("n0", seen(**given))
    assert (len(found.hardware), len(found.load)) == (hardware, load), found
    assert all(line.startswith("n0: ") for line in found.lines)
    assert of_any(seen(**given)).hardware == found.hardware  # hints name the same node


def test_one_node_alone_is_compared_with_nothing() -> None:
    assert facts_of("n0", {"n0": Seen(Machine(), Machine(hot=HOT), {})}) == Facts()


SLOW = Slow("ranks", "", (1,), ("n0",))
BAD = Facts(("n0: hot",))


@pytest.mark.parametrize(
    ("slow", "facts", "reported"),
    [
        (SLOW, BAD, True),
        (SLOW, Facts(), False),  # slow alone
        (SLOW, Facts(("n0: hot",), ("n0: swaps",)), False),  # which explains it, too
        (Slow("ranks", "", (1,), ("n0",), loads=True), BAD, False),
        (Slow("ranks", "", (1,), ("n0",), saves=True), BAD, False),
        (Slow("ranks", "", (1, 2), ("n0", "n1")), BAD, False),
        (Slow("communication", ""), BAD, False),
        (Slow("all", ""), BAD, False),
    ],
)
def test_a_machine_is_reported_only_for_both(slow: Slow, facts: Facts, reported: bool) -> None:
    assert corroborated(slow, facts) is reported


@pytest.mark.parametrize(
    ("name", "grown", "lines"),
    [
        ("memory mc0 corrected ECC errors", 1, 0),
        ("memory mc0 corrected ECC errors", 500, 1),
        ("memory mc0 uncorrected ECC errors", 1, 1),
        ("GPU 0000:1b:00.0 corrected ECC errors", 500, 0),
        ("GPU 0000:1b:00.0 uncorrected ECC errors", 1, 1),
        ("GPU 0000:1b:00.0 failed row remappings", 1, 1),
        ("GPU 0000:1b:00.0 PCIe replays", 3, 0),
        ("GPU 0000:1b:00.0 NVLink 4 crc_flit errors", 50, 1),
        ("GPU 0000:1b:00.0 NVLink 4 link_downed", 1, 1),
        ("eth0 rx_errors", 3, 0),
        ("mlx5_0 port 1 link_downed", 1, 1),
    ],
)
def test_single_errors_are_facts_only_where_data_or_the_link_is_lost(
    name: str, grown: int, lines: int
) -> None:
    idle = {"n1": Seen(Machine(), Machine(), {})}
    found = facts_of("n0", {"n0": Seen(Machine(), Machine(), {name: grown})} | idle)
    assert len(found.hardware) == lines
