"""A recovery keeps the ranks that are well, or restarts all (pure)."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.failure import Symptom
from srun_wrapper.orders.rejoining import may_go_on, may_stay


@pytest.mark.parametrize(
    ("symptom", "failures", "other_code", "exchange", "stay"),
    [
        ("crash", 1, False, False, True),
        ("hang", 1, False, False, True),
        ("node_lost", 0, False, False, True),
        ("nan", 1, False, False, False),
        ("sdc", 1, False, False, False),
        ("stuck", 1, False, False, False),
        ("crash", 2, False, False, False),
        ("crash", 1, True, False, False),
        ("crash", 1, False, True, False),
    ],
)
def test_ranks_that_are_well_may_stay(
    symptom: Symptom, failures: int, other_code: bool, exchange: bool, stay: bool
) -> None:
    assert may_stay(symptom, failures, other_code=other_code, exchange=exchange) is stay


@pytest.mark.parametrize(
    ("from_memory", "step", "may"),
    [(True, 7, True), (True, 0, False), (True, None, False), (False, 7, False)],
)
def test_only_a_snapshot_in_memory_puts_all_back(
    from_memory: bool, step: int | None, may: bool
) -> None:
    assert may_go_on(from_memory=from_memory, step=step) is may
