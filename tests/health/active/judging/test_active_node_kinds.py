"""Nodes of one GPU model that have 4 or 8 of them: each is compared with its own kind only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from health.active.coordinator.procedure import _floor_gbps
from health.active.judging import fleet, records
from health.active.judging.fleet import Baselines, baselines, event_data
from health.active.judging.judge import judge
from health.active.judging.pairing import PairKind
from health.active.judging.profiles import Floor, Floors
from health.active.judging.speed import slow
from health.active_tests import Measured
from health.node.system import Event
from health.settings import defaults

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
    floors = {gpus: _floor_gbps(PairKind("nccl", (MODEL,), gpus), 2, known) for gpus in BUSBW}
    assert floors == {gpus: pytest.approx(0.6 * busbw / 10) for gpus, busbw in BUSBW.items()}


def test_a_node_whose_devices_are_not_counted_is_compared_where_there_is_one_kind() -> None:
    (alone,) = (one for one in results("f1", 4, 0.5) if one.test == "local")
    assert slow([alone], none, record(NODES.items(), counted=True)) == []
    small = [(node, gpus) for node, gpus in NODES.items() if gpus == 4]
    assert [one.status for one in slow([alone], none, record(small, counted=True))] == ["FAIL"]


def test_a_result_of_a_node_whose_devices_nobody_counted_sets_no_standard() -> None:
    one = Measured("local", "n1", "", MODEL, {"busbw_gbps": 1.0})
    assert not baselines([Event(1.0, fleet.KIND, "b", event_data(one, "quick"))]).spreads


def local(nodes: Mapping[str, int], share: float, *, named: bool = True) -> list[Measured]:
    """The nodes' speeds of "local", and what says how many devices they have."""
    found = [one for node, gpus in nodes.items() for one in results(node, gpus, share)]
    return [one for one in found if one.test == "local" or (named and one.test == "gemm")]


def said(measured: Sequence[Measured], known: Baselines, floors: Floors = none) -> dict[str, str]:
    """The status of each node whose "local" is slow."""
    found = slow(measured, floors, known)
    return {one.node: one.status for one in found if one.test == "local"}


def nodes(prefix: str, count: int, gpus: int) -> dict[str, int]:
    return {f"{prefix}{i}": gpus for i in range(count)}


EIGHT, FOUR = nodes("n", 100, 8), nodes("f", 9, 4)
SLOW = 0.5


def warned(found: Mapping[str, object]) -> dict[str, str]:
    return dict.fromkeys(found, "WARN")


def test_a_kind_that_is_slow_as_a_whole_beside_another_that_is_not() -> None:
    known = record({**EIGHT, **FOUR}.items(), counted=True)
    large, small = nodes("n", 9, 8), nodes("f", 3, 4)
    run = [*local(large, SLOW), *local(small, 1.0)]
    assert said(run, known) == warned(large)


@pytest.mark.parametrize(
    ("large", "small", "found"),
    [
        (1, 9, {"n0": "FAIL"}),  # one node is slow: it is that node
        (1, 1, {"n0": "FAIL"}),
        (2, 9, {"n0": "FAIL", "n1": "FAIL"}),  # two are no group
    ],
)
def test_one_node_that_is_slow_is_named(large: int, small: int, found: dict[str, str]) -> None:
    known = record({**EIGHT, **FOUR}.items(), counted=True)
    run = [*local(nodes("n", large, 8), SLOW), *local(nodes("f", small, 4), 1.0)]
    assert said(run, known) == found
    alike = [*local(nodes("n", large, 8), SLOW), *local(nodes("o", small, 8), 1.0)]
    assert said(alike, known) == found
    # Where only one node of the run has a limit, it is not everybody.
    unknown = [*local({"n0": 8}, SLOW), *local(nodes("f", 4, 4), SLOW)]
    assert said(unknown, record(EIGHT.items(), counted=True)) == {"n0": "FAIL"}


def test_a_result_of_the_cpu_is_no_device_more() -> None:
    """A result of an earlier release does not say how many devices the node had."""
    cpu = Measured("gemm", "n1", "cpu", "cpu", {"bf16_tflops": 1.0})
    events = [
        Event(1.0, fleet.KIND, "b", event_data(one, "quick"))
        for one in [cpu, *(one for node in EIGHT for one in results(node, 8))]
    ]
    assert said(local({"n1": 8}, SLOW), baselines(events)) == {"n1": "FAIL"}


def test_a_floor_that_is_no_proof_does_not_hide_a_node_that_is_bad() -> None:
    """Nodes under a link's published floor, as fast as usual, say nothing about the slow one."""
    known = record({**EIGHT, **FOUR}.items(), counted=True)
    run = [*local(nodes("n", 2, 8), 1.0), *local({"n2": 8}, 0.2), *local({"f1": 4}, 4.0)]
    floor = Floor(500.0, "x", proof=False)
    assert said(run, known, lambda *_: floor) == {"n0": "WARN", "n1": "WARN", "n2": "FAIL"}


@pytest.mark.parametrize("test", ["local", "pair"])
def test_results_without_a_named_device_are_of_the_workers_devices(
    test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of such tests alone say how many devices the node has."""
    written: list[Event] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(records, "tell", lambda _dir, events, _s: written.extend(*events.values()))
    for node, gpus in nodes("n", 20, 8).items():
        ran = [one for one in results(node, gpus) if one.test == test]
        judged = judge(ran, devices={node: gpus})
        settings = defaults([])._replace(state_dir=str(tmp_path))
        records.write(settings, judged, "quick", "here")
    known = baselines(written)
    assert known.spreads[f"8 x {MODEL}", test, "busbw_gbps"].nodes == 20
    if test == "local":
        alone = judge(local({"n1": 8}, SLOW, named=False), baselines=known, devices={"n1": 8})
        assert list(alone.named) == ["n1"]
