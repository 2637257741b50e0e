"""Nodes of one GPU model that have 4 or 8 of them: each is compared with its own kind only."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from health.active.judging import fleet
from health.active.judging.fleet import Baselines, baselines, event_data
from health.active.judging.kinds import PairKind, floor_gbps
from health.active.judging.profiles import Floor
from health.active.judging.speed import slow
from health.active_tests import Measured
from health.node.system import Event

MODEL = "NVIDIA H200"
BUSBW = {4: 150.0, 8: 450.0}  # GB/s: fewer GPUs, another kind of link
NODES = {**{f"n{i}": 8 for i in range(300)}, **{f"f{i}": 4 for i in range(9)}}


def results(node: str, gpus: int, share: float = 1.0) -> list[Measured]:
    busbw = share * BUSBW[gpus]
    devices = [f"gpu{i}" for i in range(gpus)]
    return [
        *(Measured("gemm", node, name, MODEL, {"bf16_tflops": 700.0}) for name in devices),
        *(Measured("links", node, name, MODEL, {"p2p_gbps": busbw}) for name in devices),
        Measured("local", node, "", MODEL, {"busbw_gbps": busbw}),
        Measured("pair", node, "", MODEL, {"busbw_gbps": busbw / 10}, peers=(node, "x")),
    ]


def record(nodes: Iterable[tuple[str, int]], *, counted: bool) -> Baselines:
    """``counted``: the events say how many devices a node had, as those of old releases do not."""
    return baselines(
        Event(1.0, fleet.KIND, "b", event_data(one, "quick", devices=gpus if counted else 0))
        for node, gpus in nodes
        for one in results(node, gpus)
    )


def none(model: str, value: str) -> Floor | None:
    return None


@pytest.mark.parametrize("counted", [True, False])
def test_a_fleet_of_two_kinds_of_node_has_no_outlier(counted: bool) -> None:
    known = record(NODES.items(), counted=counted)
    assert known.spreads[MODEL, "gemm", "bf16_tflops"].nodes == len(NODES)
    for node, gpus in (("n1", 8), ("f1", 4)):
        assert slow(results(node, gpus), none, known) == []
        (bad, *_) = slow(results(node, gpus, 0.5), none, known)
        assert (bad.node, bad.status) == (node, "FAIL"), "of its own kind it is far below all"


@pytest.mark.parametrize("counted", [True, False])
def test_a_pair_of_small_nodes_is_not_held_to_the_speed_of_large_ones(counted: bool) -> None:
    known = record(NODES.items(), counted=counted)
    floors = {gpus: floor_gbps(PairKind("nccl", (MODEL,), gpus), 2, known) for gpus in BUSBW}
    assert floors == {gpus: pytest.approx(0.6 * busbw / 10) for gpus, busbw in BUSBW.items()}


def test_a_node_whose_devices_are_not_counted_is_compared_where_there_is_one_kind() -> None:
    (alone,) = (one for one in results("f1", 4, 0.5) if one.test == "local")
    assert slow([alone], none, record(NODES.items(), counted=True)) == []
    small = [(node, gpus) for node, gpus in NODES.items() if gpus == 4]
    assert [one.status for one in slow([alone], none, record(small, counted=True))] == ["FAIL"]


def test_a_result_of_a_node_whose_devices_nobody_counted_sets_no_standard() -> None:
    one = Measured("local", "n1", "", MODEL, {"busbw_gbps": 1.0})
    assert not baselines([Event(1.0, fleet.KIND, "b", event_data(one, "quick"))]).spreads
