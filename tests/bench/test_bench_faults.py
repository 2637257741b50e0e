"""Judging a run of bench.faults, and that its kinds are what the documentation says."""

from __future__ import annotations

from typing import Any

import pytest

from bench.chaos.case import Run
from bench.chaos.verdict import Expected, Observed, judge
from bench.common import Results
from bench.faults.__main__ import QUICK, SEEDS, Turn, main, summary
from bench.faults.judge import Finding, find
from bench.faults.kind import Pick
from bench.faults.kinds import KINDS

N2, N3 = frozenset({"n2"}), frozenset({"n3"})
BROKEN = Expected(bad=N2, found=N2)


def incident(cause: str, *suspects: str, at: float = 11.0, lost: int | None = 4) -> dict[str, Any]:
    return {"cause": cause, "suspects": list(suspects), "time": at, "lost_steps": lost}


def found(incidents: list[dict[str, Any]], expected: Expected = BROKEN) -> Finding:
    verdict = judge(expected, Observed("COMPLETED", 1.0, 1.0, replaced=expected.bad))
    causes = ("node",) if expected.bad else ()
    return find(expected.found, causes, verdict, incidents, began=10.0)


def test_a_bad_machine_that_is_named_is_right() -> None:
    finding = found([incident("node", "n2"), incident("unknown", at=13.0, lost=2)])
    assert finding.right and finding.machine_right
    assert (finding.detected, finding.lost_steps) == (1.0, 6)
    assert finding.causes == ("node", "unknown") and finding.named == N2


@pytest.mark.parametrize(
    "incidents", [[], [incident("node", "n3")], [incident("unknown")]], ids=str
)
def test_a_bad_machine_that_no_incident_names_is_wrong(incidents: list[dict[str, Any]]) -> None:
    finding = found(incidents)
    assert finding.machine_right is False and not finding.right


def test_the_machine_alone_is_not_enough() -> None:
    finding = found([incident("user", "n2")])
    assert finding.machine_right and not finding.cause_right and not finding.right


def test_a_fault_of_no_machine_must_not_be_called_one() -> None:
    assert found([], Expected()).right
    assert found([incident("shared")], Expected()).machine_right is None
    assert not found([incident("node", "n2")], Expected()).right


@pytest.mark.parametrize(
    ("suspects", "bad", "right"),
    [
        (("n2",), N2, True),
        (("n2", "n3"), N2, False),
        ((), frozenset(), True),
        (("n3",), frozenset(), False),
    ],
)
def test_where_nothing_is_done_no_healthy_node_may_be_named(
    suspects: tuple[str, ...], bad: frozenset[str], right: bool
) -> None:
    verdict = judge(Expected(named=bad), Observed("COMPLETED", 1.0, 1.0))
    incidents = [incident("unknown", *suspects)]
    found = find(bad, ("unknown",), verdict, incidents, 10.0, no_others=True)
    assert found.right is right


def test_healthy_nodes_that_are_acted_on_are_false_evictions() -> None:
    verdict = judge(BROKEN, Observed("COMPLETED", 1.0, 1.0, replaced=N2 | N3))
    finding = find(N2, ("node",), verdict, [incident("node", "n2")], 10.0)
    assert finding.evictions == 1 and not finding.right


@pytest.mark.parametrize(
    ("lost_twice", "suspects", "right"),
    [
        (N2, ("n2",), True),
        (frozenset(), ("n2",), False),  # reported for one loss
        (N2, ("n2", "n3"), False),
        (N2, (), False),
    ],
)
def test_the_report_of_a_second_loss_stands_only_where_it_says_so(
    lost_twice: frozenset[str], suspects: tuple[str, ...], right: bool
) -> None:
    seen = Observed("COMPLETED", 1.0, 1.0, reported=N2, replaced=N2, lost_twice=lost_twice)
    incidents = [incident("node", *suspects)]
    assert find((), (), judge(Expected(flaps=N2), seen), incidents, 10.0).right is right
    assert not find((), (), judge(Expected(), seen), incidents, 10.0).right


def test_steps_lost_in_an_incident_that_does_not_know_are_not_known() -> None:
    assert found([incident("node", "n2"), incident("user", lost=None)]).lost_steps is None


def test_metrics() -> None:
    verdict = judge(BROKEN, Observed("COMPLETED", 1.0, 1.0, replaced=N2 | N3))
    run = Run("node_crash", verdict, "", "", 1.0)
    named = find(N2, ("node",), verdict, [incident("node", "n2")], 10.0)
    missed = find(N2, ("node",), verdict, [], 10.0)
    results = Results("faults")
    summary(results, [Turn("node_crash", 0, run, named), Turn("ecc", 0, run, missed)])
    metrics = {name: metric.median for name, metric in results.metrics.items()}
    assert metrics["faults.right_machine"] == 0.5
    assert metrics["faults.false_evictions"] == 2
    assert metrics["faults.kinds"] == 2
    assert metrics["faults.lost_steps"] == 2.0  # the median of 4 and 0


def test_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(KINDS) >= 30 and set(QUICK) <= set(KINDS)
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_eight_ranks_and_breaks_no_batch_host(name: str) -> None:
    for seed in range(SEEDS):
        case = KINDS[name].case(seed)
        assert case.nodes * case.per_node == 8
        assert "n1" not in case.expected.bad
        assert bool(case.expected.bad) == ("node" in KINDS[name].causes)


def test_seeds_choose_rank_node_and_step() -> None:
    picks = [Pick.of("x", seed) for seed in range(20)]
    assert picks == [Pick.of("x", seed) for seed in range(20)]
    assert {pick.node for pick in picks} == {"n2", "n3", "n4"}
    assert len({pick.rank for pick in picks}) > 4 and len({pick.step for pick in picks}) > 4
    assert all(pick.node != pick.other for pick in picks)
