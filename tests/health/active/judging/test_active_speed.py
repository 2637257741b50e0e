"""The naming of devices that are too slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from health.active.judging.fleet import NO_BASELINES, Baselines, FleetSpread
from health.active.judging.profiles import Floor, Floors
from health.active.judging.speed import SlowDevice, slow
from health.active_tests import Measured

NAME = "bf16_tflops"
FOUR = {f"o{i}": 100.0 for i in range(4)}
THREE_WARN: dict[str, str] = dict.fromkeys(["n1", "n2", "n3"], "WARN")
THREE_FAIL: dict[str, str] = dict.fromkeys(["n1", "n2", "n3"], "FAIL")


def run(speeds: Mapping[str, float | Sequence[float]], test: str = "gemm") -> list[Measured]:
    return [
        Measured(test, node, f"gpu{index}", "m", {NAME: value})
        for node, values in speeds.items()
        for index, value in enumerate(values if isinstance(values, Sequence) else [values])
    ]


def fleet_of(p50: float, nodes: int = 20) -> Baselines:
    return Baselines({("m", "gemm", NAME): FleetSpread(p50, nodes)}, {})


def below(limit: float) -> Floors:
    return lambda model, value: Floor(limit, "the data sheet") if value == NAME else None


def none(model: str, value: str) -> Floor | None:
    return None


@pytest.mark.parametrize(
    ("speeds", "floor", "baselines", "found"),
    [
        # The floor.
        ({"n1": 99, "n2": 101}, 100, NO_BASELINES, {"n1": "FAIL"}),
        ({"n1": 100, "n2": 101}, 100, NO_BASELINES, {}),
        # Everybody below it: the floor does not fit here.
        ({"n1": 90, "n2": 91}, 100, NO_BASELINES, {"n1": "FAIL", "n2": "FAIL"}),
        ({"n1": 90, "n2": 91, "n3": 92}, 100, NO_BASELINES, THREE_WARN),
        ({"n1": 90, "n2": 91, "n3": [92, 100]}, 100, NO_BASELINES, THREE_FAIL),
        # The fleet's record: below 60 is beyond any shift.
        ({"n1": 60}, None, fleet_of(100), {}),
        ({"n1": 59}, None, fleet_of(100), {"n1": "FAIL"}),
        ({"n1": 59}, 50, fleet_of(100), {"n1": "FAIL"}),
        ({"n1": 1}, None, fleet_of(100, nodes=7), {}),
        ({"n1": 1, "n2": 1, "n3": 1}, None, fleet_of(100), THREE_WARN),
        # The run itself, from 5 devices on.
        ({"n1": 49, **FOUR}, None, NO_BASELINES, {"n1": "FAIL"}),
        ({"n1": 51, **FOUR}, None, NO_BASELINES, {}),
        ({"n1": 1, "n2": 100, "n3": 100, "n4": 100}, None, NO_BASELINES, {}),
        ({"n1": [100, 100, 49, 100, 100]}, None, NO_BASELINES, {"n1": "FAIL"}),
        # Two kinds of machine under one name.
        (
            {f"n{i}": 40 if i < 3 else 100 for i in range(8)},
            None, NO_BASELINES, dict.fromkeys(["n0", "n1", "n2"], "WARN"),
        ),
        (
            {f"n{i}": 40 if i < 2 else 100 for i in range(8)},
            None, NO_BASELINES, {"n0": "FAIL", "n1": "FAIL"},
        ),
        # All are below the floor, one is far below all: that one is named.
        (
            {f"n{i}": 30 if i == 4 else 90 for i in range(8)},
            100, NO_BASELINES, {f"n{i}": "FAIL" if i == 4 else "WARN" for i in range(8)},
        ),
        # No speed at all.
        ({"n1": float("nan"), "n2": float("inf")}, 100, fleet_of(100), {}),
        ({"n1": 0.0}, 100, NO_BASELINES, {"n1": "FAIL"}),
    ],
)  # fmt: skip
def test_who_is_slow(
    speeds: dict[str, float], floor: float | None, baselines: Baselines, found: dict[str, str]
) -> None:
    floors = none if floor is None else below(floor)
    said = slow(run(speeds), floors, baselines)
    assert {one.node: one.status for one in said} == found


def test_the_evidence_has_the_value_the_limit_and_its_source() -> None:
    speeds = {"n1": 39.04, **{f"n{i}": 100.0 for i in range(2, 8)}}
    (by_floor,) = slow(run(speeds), below(80), NO_BASELINES)
    assert by_floor == SlowDevice(
        "n1", "gemm", "gpu0", "FAIL",
        "bf16_tflops 39.04 is below 0.5 of 100, the median of the 7 in this run; "
        "bf16_tflops 39.04 is below 80 (the data sheet)",
    )  # fmt: skip
    (by_fleet,) = slow(run({"n1": 55}), none, fleet_of(100))
    assert by_fleet.evidence == (
        "bf16_tflops 55 is below 60, 0.6 of the median 100 of 20 nodes of the fleet"
    )


def test_several_values_of_a_device_are_one_statement() -> None:
    one = Measured("gemm", "n1", "gpu0", "m", {"bf16_tflops": 1.0, "fp16_tflops": 2.0})
    (said,) = slow([one], lambda model, value: Floor(5, "x"), NO_BASELINES)
    assert said.evidence == "bf16_tflops 1 is below 5 (x); fp16_tflops 2 is below 5 (x)"


def test_what_is_no_speed_or_of_a_pair_is_not_judged_here() -> None:
    values = {"seconds": 1.0, "bytes": 1.0}
    assert not slow([Measured("gemm", "n1", "gpu0", "m", values)], below(5), NO_BASELINES)
    assert not slow(run({"n1": 1.0}, "pair"), below(5), NO_BASELINES)


@pytest.mark.parametrize(("device", "found"), [("", []), ("gpu0", ["n1"])])
def test_nodes_with_another_number_of_devices_are_not_compared(
    device: str, found: list[str]
) -> None:
    """One value of a whole node: four GPUs over PCIe are slower than two with a bridge."""
    nodes = {"n1": 4, "o0": 2, "o1": 2, "o2": 2, "o3": 2}
    measured = [
        Measured("gemm", node, f"gpu{n}", "m", {NAME: 100.0})
        for node, count in nodes.items()
        for n in range(count)
    ]
    value = "bus_gbps"
    measured += [
        Measured("local", node, device, "m", {value: 100.0 / count**2})
        for node, count in nodes.items()
    ]
    assert [one.node for one in slow(measured, none, NO_BASELINES)] == found


def test_models_are_not_compared_with_each_other() -> None:
    others = [one._replace(model="other") for one in run({f"o{i}": 100.0 for i in range(8)})]
    assert not slow([*run({"n1": 10.0}), *others], none, NO_BASELINES)


def test_a_published_floor_of_a_link_warns_and_the_fleet_or_the_run_may_fail() -> None:
    def weak(model: str, value: str) -> Floor:
        return Floor(50, "the usual", proof=False)

    (said,) = slow(run({"n1": 40.0}), weak, NO_BASELINES)
    assert (said.status, said.evidence) == ("WARN", "bf16_tflops 40 is below 50 (the usual)")
    (said,) = slow(run({"n1": 40.0}), weak, fleet_of(100))
    assert said.status == "FAIL" and "below 50" in said.evidence and "the fleet" in said.evidence
    (said,) = slow(run({"n1": 40.0, **FOUR}), weak, NO_BASELINES)
    assert said.status == "FAIL"


@pytest.mark.parametrize(
    ("speeds", "status"),
    [
        ({"n1": [40, 40, *[100] * 6]}, "FAIL"),
        ({"n1": [40, 40, 40, *[100] * 5]}, "WARN"),  # two kinds of device in one node
        ({"n1": [40] * 4, "n2": [100] * 5}, "WARN"),
    ],
)
def test_few_nodes_are_judged_by_their_devices(
    speeds: dict[str, Sequence[float]], status: str
) -> None:
    said = slow(run(speeds), none, NO_BASELINES)
    assert said and {one.status for one in said} == {status}
    assert ("two kinds" in said[0].evidence) == (status == "WARN")


def test_of_two_devices_only_the_same_two_elsewhere_are_compared() -> None:
    """GPUs 0 and 1 have NVLink in between, the others reach each other by PCIe."""
    between = {
        f"gpu{a}": {f"p2p_gpu{b}_gbps": 300.0 if {a, b} == {0, 1} else 20.0 for b in range(8)}
        for a in range(8)
    }
    nodes = [
        Measured("links", f"n{i}", device, "m", values)
        for i in range(6)
        for device, values in between.items()
    ]
    assert not slow(nodes, none, NO_BASELINES)
    nodes[1] = nodes[1]._replace(values={"p2p_gpu0_gbps": 20.0})  # gpu1 of n0 has lost it
    (said,) = slow(nodes, none, NO_BASELINES)
    assert (said.node, said.device, said.status) == ("n0", "gpu1", "FAIL")
