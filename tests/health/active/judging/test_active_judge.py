"""The judgement of each node after a run of active tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.active.judging.fleet import Baselines
from health.active.judging.judge import judge
from health.active.judging.pairing import PairVerdict
from health.active.judging.profiles import Floor
from health.active_tests import Judged, Measured
from health.finding import Finding

H100 = "NVIDIA H100 80GB HBM3"


def gemm(node: str, tflops: float = 700.0, device: str = "gpu0", **more: Any) -> Measured:
    return Measured("gemm", node, device, H100, {"bf16_tflops": tflops})._replace(**more)


def bits(node: str, digest: str = "a", **more: Any) -> Measured:
    return Measured("bitwise", node, "gpu0", H100, digests={"dense/k": digest})._replace(**more)


def verdict(
    named: Mapping[str, tuple[str, ...]] = {},
    cleared: frozenset[str] = frozenset(),
    undecided: Mapping[str, str] = {},
    errors: Mapping[str, str] = {},
) -> PairVerdict:
    return PairVerdict(dict(named), cleared, dict(undecided), dict(errors), None)


def asked(nodes: int, *tests: str) -> dict[str, frozenset[str]]:
    return {f"n{i}": frozenset(tests) for i in range(nodes)}


def only(judged: Judged, node: str) -> Finding:
    (finding,) = judged.findings[node]
    return finding


def test_a_run_without_a_fault_clears_all_and_says_nothing() -> None:
    results = [one for i in range(4) for one in (gemm(f"n{i}"), bits(f"n{i}"))]
    judged = judge(results, asked=asked(4, "gemm", "bitwise"), seconds=3.0, left_out=["pair: no"])
    assert judged.cleared == {"n0", "n1", "n2", "n3"}
    assert (judged.findings, judged.named, judged.errors) == ({}, {}, {})
    assert (judged.seconds, judged.left_out) == (3.0, ("pair: no",))
    assert sorted(judged.measured, key=repr) == sorted(results, key=repr)


@pytest.mark.parametrize("test", ["gemm", "memory", "links", "local"])
def test_a_wrong_result_names_the_node(test: str) -> None:
    results = [Measured(test, f"n{i}", "gpu3") for i in range(4)]
    results[2] = results[2]._replace(wrong=("7 of 9 words differ", "again"))
    judged = judge(results, asked=asked(4, test))
    evidence = "7 of 9 words differ (and 1 more)"
    assert only(judged, "n2") == Finding(
        "FAIL", "node", f"active-{test}-wrong", "gpu3", evidence, "service"
    )
    assert judged.named == {"n2": (f"active-{test}-wrong gpu3: {evidence}",)}
    assert judged.cleared == {"n0", "n1", "n3"}


def test_what_all_nodes_compute_wrongly_is_the_tests_fault() -> None:
    judged = judge([gemm(f"n{i}", wrong=("x",)) for i in range(3)], asked=asked(3, "gemm"))
    assert not judged.named and not judged.cleared and set(judged.errors) == {"n0", "n1", "n2"}
    for nodes in (2, 4):  # of 4 one is right
        results = [gemm(f"n{i}", wrong=("x",) * (i < 3)) for i in range(nodes)]
        assert set(judge(results).named) == {f"n{i}" for i in range(min(nodes, 3))}


def test_other_bits_name_the_node() -> None:
    judged = judge([bits("n0"), bits("n1"), bits("n2", "b")], asked=asked(3, "bitwise"))
    assert set(judged.named) == {"n2"}
    assert only(judged, "n2").check == "active-bitwise-differs"
    alone = judge([bits("n0", wrong=("step 3 differs",))], asked=asked(1, "bitwise"))
    assert alone.named == {"n0": ("active-bitwise-differs: gpu0: step 3 differs",)}


def test_two_that_disagree_are_undecided_and_not_cleared() -> None:
    judged = judge([bits("n0"), bits("n1", "b")], asked=asked(2, "bitwise"))
    assert not judged.named and not judged.cleared
    found = only(judged, "n1")
    assert (found.status, found.cls, found.check) == ("WARN", "tool", "active-undecided")


def test_the_fleets_digest_decides() -> None:
    fleet = Baselines({}, {"dense/k": "a"})
    both = [bits("n0"), bits("n1", "b")]
    assert set(judge(both, baselines=fleet).named) == {"n1"}


def test_below_the_floor_names_the_node() -> None:
    judged = judge([gemm("n0"), gemm("n1", 300.0)], asked=asked(2, "gemm"))
    assert only(judged, "n1") == Finding(
        "FAIL", "node", "active-gemm-slow", "gpu0",
        f"bf16_tflops 300 is below 544.2 (0.55 of the published 989.5 of {H100})", "reset-gpu",
    )  # fmt: skip
    assert set(judged.named) == {"n1"} and judged.cleared == {"n0"}


def test_a_site_may_set_other_floors() -> None:
    assert not judge([gemm("n0", 300.0)], floors=lambda model, value: None).named
    high = judge([gemm("n0", 300.0)], floors=lambda model, value: Floor(400, "the site"))
    assert "400 (the site)" in high.named["n0"][0]


def test_a_slow_node_is_found_by_the_others_and_rebooted() -> None:
    results = [Measured("local", f"n{i}", "", "X1", {"busbw_gbps": 1.0}) for i in range(5)]
    results[3] = results[3]._replace(values={"busbw_gbps": 0.2})
    judged = judge(results, asked=asked(5, "local"))
    assert set(judged.named) == {"n3"}
    assert only(judged, "n3").action == "reboot"


def test_a_slow_cpu_is_only_told_for_others_may_be_using_it() -> None:
    results = [Measured("gemm", f"n{i}", "cpu", "cpu", {"fp32_tflops": 1.0}) for i in range(5)]
    results[3] = results[3]._replace(values={"fp32_tflops": 0.2})
    judged = judge(results, asked=asked(5, "gemm"))
    assert not judged.named and only(judged, "n3").status == "WARN"


def test_what_could_not_run_is_an_error_and_names_nobody() -> None:
    results = [gemm("n0"), gemm("n1", error="torch cannot be imported:\n no module")]
    judged = judge(results, asked=asked(3, "gemm"))
    assert only(judged, "n1") == Finding(
        "ERROR", "tool", "active-error", "gpu0",
        "gemm could not be run: torch cannot be imported: no module", "none",
    )  # fmt: skip
    assert judged.errors["n2"] == ("gemm did not run: the worker sent no result",)
    assert not judged.named and judged.cleared == {"n0"}


def test_errors_everywhere_name_nobody() -> None:
    results = [gemm(f"n{i}", error="no torch") for i in range(8)]
    judged = judge(results, asked=asked(8, "gemm", "bitwise", "pair"))
    assert not judged.named and not judged.cleared and len(judged.errors) == 8


def test_only_who_was_asked_is_cleared() -> None:
    judged = judge([gemm("n0"), gemm("n1")], asked={"n0": frozenset(["gemm"]), "n1": frozenset()})
    assert judged.cleared == {"n0"}
    assert not judge([gemm("n0")]).cleared


def test_pairs() -> None:
    results = [
        Measured("pair", "n1", peers=("n0", "n1"), wrong=("sum differs",)),
        Measured("pair", "n2", peers=("n2", "n4"), values={"busbw_gbps": 0.1}),
        Measured("pair", "n5", peers=("n5", "n4"), error="connection refused"),
    ]
    judged = judge(
        results,
        pairs=verdict(
            {"n1": ("wrong with n0", "wrong with n3"), "n2": ("slow with n4",)},
            frozenset(["n0", "n4"]),
            {"n3": "no proven partner"},
            {"n5": "connection refused"},
        ),
        asked=asked(7, "pair"),
    )
    assert judged.cleared == {"n0", "n4"}
    assert judged.named == {
        "n1": ("active-pair-wrong: wrong with n0; wrong with n3",),
        "n2": ("active-pair-slow: slow with n4",),
    }
    assert only(judged, "n3").check == "active-undecided"
    assert judged.errors == {
        "n5": ("pair could not be run: connection refused",),
        "n6": ("pair did not run: no pair with this node finished",),
    }


def test_pairs_that_were_asked_and_never_made_clear_nobody() -> None:
    judged = judge([gemm("n0")], asked=asked(1, "gemm", "pair"))
    assert not judged.cleared and set(judged.errors) == {"n0"}


def test_other_findings_of_the_nodes_count() -> None:
    changed = Finding("FAIL", "node", "active-gpu-lost", "gpu1", "does not answer", "reboot")
    tool = Finding("ERROR", "tool", "active-dcgm", "", "dcgmi did not end", "none")
    warned = Finding("WARN", "node", "active-dcgm", "", "old version", "none")
    judged = judge(
        [gemm(f"n{i}") for i in range(3)],
        asked=asked(3, "gemm"),
        more={"n0": [changed, changed], "n1": [tool], "n2": [warned]},
    )
    assert judged.named == {"n0": ("active-gpu-lost gpu1: does not answer",)}
    assert judged.findings["n0"] == (changed,)
    assert judged.errors == {"n1": ("dcgmi did not end",)}
    assert judged.cleared == {"n2"}


def test_the_worst_finding_comes_first() -> None:
    judged = judge([gemm("n0", 300.0, wrong=("w",), error="then it died")])
    assert [f.status for f in judged.findings["n0"]] == ["FAIL", "FAIL", "ERROR"]


_SPEEDS = st.sampled_from([100.0, 300.0, 700.0, 710.0])
_ANY = st.lists(
    st.builds(
        lambda node, speed, digest, wrong, error, test: Measured(
            test, f"n{node}", "gpu0", H100, {"bf16_tflops": speed}, {"k": digest},
            ("differs",) * wrong, error,
        ),
        st.integers(0, 6), _SPEEDS, st.sampled_from(["a", "b"]), st.integers(0, 1),
        st.sampled_from(["", "", "no torch"]), st.sampled_from(["gemm", "bitwise"]),
    ),
    max_size=14,
)  # fmt: skip


@given(_ANY, st.data())
def test_the_order_of_results_does_not_matter(results: list[Measured], data: st.DataObject) -> None:
    tests = asked(7, "gemm", "bitwise")
    judged = judge(results, asked=tests)
    assert judge(data.draw(st.permutations(results)), asked=tests) == judged
    assert not judged.cleared & (set(judged.named) | set(judged.errors))


@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from([H100, "cpu", "other"]), st.data())
def test_equal_nodes_are_never_named(
    nodes: int, devices: int, model: str, data: st.DataObject
) -> None:
    speed = data.draw(st.floats(545, 990) if model == H100 else st.floats(0, 990))
    if nodes >= 3:
        speed = data.draw(st.floats(0, 990))  # even below the floor, if all are
    results = [
        Measured(test, f"n{node}", f"gpu{device}", model, {"bf16_tflops": speed}, {"k": "a"})
        for node in range(nodes)
        for device in range(devices)
        for test in ("gemm", "bitwise")
    ]
    judged = judge(results, asked=asked(nodes, "gemm", "bitwise"))
    assert not judged.named and not judged.errors and len(judged.cleared) == nodes


@given(st.integers(3, 20), st.integers(1, 8), st.data())
def test_the_one_deviant_is_named(nodes: int, devices: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, nodes - 1))
    results = [
        Measured("bitwise", f"n{i}", f"gpu{d}", H100, digests={"k": "b" if i == odd else "a"})
        for i in range(nodes)
        for d in range(devices)
    ]
    judged = judge(results, asked=asked(nodes, "bitwise"))
    assert set(judged.named) == {f"n{odd}"} and len(judged.cleared) == nodes - 1
