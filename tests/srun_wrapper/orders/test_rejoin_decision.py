"""A recovery keeps the ranks that are well, or restarts all (pure)."""

from __future__ import annotations

import pytest

from srun_wrapper.orders.rejoining import RejoinCase, may_go_on, why_not

FINE = RejoinCase("crash", 1, other_code=False, exchange=False)


@pytest.mark.parametrize("case", [FINE, FINE._replace(symptom="hang"),
                                  FINE._replace(symptom="node_lost", failures=0)])  # fmt: skip
def test_they_may_stay(case: RejoinCase) -> None:
    assert why_not(case) == ""


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (FINE._replace(symptom="nan"), "no process is trusted"),
        (FINE._replace(symptom="sdc"), "no process is trusted"),
        (FINE._replace(symptom="differs"), "no process is trusted"),
        (FINE._replace(symptom="stuck"), "no process is trusted"),
        (FINE._replace(failures=2), "no step was made"),
        (FINE._replace(other_code=True), "other code"),
        (FINE._replace(exchange=True), "exchange"),
    ],
)
def test_all_are_restarted(case: RejoinCase, why: str) -> None:
    assert why in why_not(case)


@pytest.mark.parametrize(
    ("from_memory", "step", "may"),
    [(True, 7, True), (True, 0, False), (True, None, False), (False, 7, False)],
)
def test_only_a_snapshot_in_memory_puts_all_back(
    from_memory: bool, step: int | None, may: bool
) -> None:
    assert may_go_on(from_memory=from_memory, step=step) is may
