"""A rank's state was spoilt: the job goes on, whatever else happened before."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import Budget, LadderPlan, Means, acquit, plan


def spoilt(node: str = "n1", *, again: bool = False) -> Diagnosis:
    return diagnose([Failure("sdc", 1.0, 0.9, node, 0, suspects=(node,), step=7, again=again)])


def next_plan(budget: Budget, found: Diagnosis, spares: int = 1) -> LadderPlan:
    budget.spend(found)
    judged, _ = acquit(found, budget)
    return plan(judged, (), budget, Means(spares, 0, True, 3))


@pytest.mark.parametrize("failures", [0, 3, 9])
@pytest.mark.parametrize(
    ("again", "spares", "told"),
    [
        (False, 1, ("restart", (), "exchange")),
        (True, 1, ("swap_spare", ("n1",), "spare")),
        (True, 0, ("restart", (), "keep")),
    ],
)
def test_no_job_ends_for_it(
    failures: int, again: bool, spares: int, told: tuple[str, tuple[str, ...], str]
) -> None:
    """The job goes on even if the recoveries before it brought no progress."""
    found = next_plan(Budget(failures=failures), spoilt(again=again), spares)
    assert (found.action, found.replace, found.rung) == told


def test_nobody_leaves_who_was_not_named_twice() -> None:
    budget = Budget()
    for node in ("n1", "n2", "n1", "n2"):
        assert next_plan(budget, spoilt(node)).replace == ()
