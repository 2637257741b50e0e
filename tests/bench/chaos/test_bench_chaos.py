"""Judging a run of bench.chaos, and that its cases are what the documentation says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.chaos import case as cases
from bench.chaos.__main__ import CASES, QUICK, describe, main, summary
from bench.chaos.case import Case, Run
from bench.chaos.job import ChaosError
from bench.chaos.rank import reference
from bench.chaos.verdict import Expected, Observed, judge, longest_gap
from bench.common import Results

N2 = frozenset({"n2"})
N3 = frozenset({"n3"})


@pytest.mark.parametrize(
    ("expected", "seen", "blamed", "missed", "lost"),
    [
        (Expected(), Observed("COMPLETED", 1.0, 1.0), (), (), ""),
        (Expected(), Observed("COMPLETED", 1.0, 1.0, reported=N2), ("n2",), (), ""),
        (Expected(), Observed("COMPLETED", 1.0, 1.0, excluded=N2), ("n2",), (), ""),
        (Expected(), Observed("COMPLETED", 1.0, 1.0, drained=N3), ("n3",), (), ""),
        (Expected(gone=N2), Observed("COMPLETED", 1.0, 1.0, replaced=N2), (), (), ""),
        (Expected(gone=N2), Observed("COMPLETED", 1.0, 1.0, reported=N2), ("n2",), (), ""),
        (Expected(bad=N2, found=N2), Observed("COMPLETED", 1.0, 1.0, reported=N2), (), (), ""),
        (Expected(bad=N2, found=N2), Observed("COMPLETED", 1.0, 1.0), (), ("n2",), ""),
        (Expected(), Observed("PENDING Why"), (), (), "pending why instead of completed"),
        (Expected(), Observed("COMPLETED", 2.0, 1.0), (), (), "loss 2.0 instead of 1.0"),
        (Expected(), Observed("COMPLETED"), (), (), "completed without a result"),
        (Expected(ends=("failed",)), Observed("FAILED"), (), (), ""),
    ],
)  # fmt: skip
def test_verdict(
    expected: Expected, seen: Observed, blamed: tuple[str, ...], missed: tuple[str, ...], lost: str
) -> None:
    verdict = judge(expected, seen)
    assert (verdict.blamed, verdict.missed, verdict.lost) == (blamed, missed, lost)
    assert verdict.right == (not (blamed or missed or lost))


def test_leftovers_are_wrong() -> None:
    verdict = judge(Expected(), Observed("COMPLETED", 1.0, 1.0, leftovers={"n1": ["robust-x"]}))
    assert not verdict.right
    assert describe(Run("x", verdict, "", "", 1.0)).endswith("left over: n1: robust-x")


def test_gap_counts_from_the_fault() -> None:
    assert longest_gap([0.0, 9.0, 10.0, 12.0], since=9.5) == 2.0
    assert longest_gap([0.0], since=0.0) == 0.0


def test_totals_are_counts_over_all_runs() -> None:
    right = judge(Expected(), Observed("COMPLETED", 1.0, 1.0, gap=1.5))
    wrong = judge(Expected(), Observed("PENDING x", reported=N2 | N3))
    results = Results("chaos")
    runs = [Run("suspend", right, "", "", 1.0), Run("node_crash", wrong, "", "", 1.0)]
    summary(results, runs)
    found = {name: metric.median for name, metric in results.metrics.items()}
    assert found == {
        "suspend.recovery_s": 1.5,
        "chaos.kinds": 2,
        "chaos.runs": 2,
        "chaos.healthy_nodes_blamed": 2,
        "chaos.healthy_jobs_lost": 1,
        "chaos.leftovers": 0,
        "chaos.missed": 0,
    }


def test_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CASES) >= 25 and set(QUICK) <= set(CASES)
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)


def test_a_run_whose_job_did_not_meet_the_fault_proves_nothing() -> None:
    job: Any = SimpleNamespace(
        lab=SimpleNamespace(scratch="/scratch"),
        dir="/shared",
        submit=lambda *_: None,
        wait_steps=lambda _: None,
        wait_end=lambda _: "COMPLETED",
        observe=lambda state: Observed(state, 1.0, 1.0),
        out=lambda: "srun: error: s1: task 0: Killed",
    )
    case = Case(name="x", broken="x", met="s1: task 0: Killed")
    assert cases._run(case, job).right
    with pytest.raises(ChaosError, match="did not meet the fault"):
        cases._run(Case(name="x", broken="x", met="s2: task 0"), job)


def test_reference_is_that_of_one_rank() -> None:
    assert reference(1, 1) == 1.0 * 0.99 + 1.0 * 1e-6
    assert reference(1, 2, stdin=True) == 1.0 * 0.99 + 4.0 * 1e-6
