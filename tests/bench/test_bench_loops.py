"""Random training loops that crash come back bit-identical, or something was said by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from bench.checkpoint_loops import Loop, draw, judge, runner, try_loop

pytestmark = pytest.mark.slow

LOOPS = 4
"""``python -m bench.checkpoint --case loops`` runs 200."""


@pytest.mark.parametrize(
    ("resumed", "said", "outcome"),
    [
        ({"state": 5, "began": 3}, "", "identical"),
        ({"state": 5, "began": 3}, "robust-slurm: rank 0: extra.ema changed", "identical"),
        ({"state": 6, "began": 3}, "robust-slurm: rank 0: extra.ema changed", "refused"),
        ({"state": 6, "began": 3}, "robust-slurm: rank 0: something is odd", "silent"),
        ({"state": 6, "began": 3}, "Warning: extra.ema", "silent"),
        (None, "CheckpointError: step 3 does not fit", "refused"),
    ],
)
def test_a_difference_that_nobody_named_is_silent(
    resumed: dict[str, Any] | None, said: str, outcome: str
) -> None:
    found = judge(draw(1), {"state": 5}, resumed, said)
    assert found.outcome == outcome
    assert found.needless == (outcome == "identical" and bool(said))


def test_seeds_give_loops_of_all_kinds() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    for name in Loop.__dataclass_fields__:
        assert len({getattr(loop, name) for loop in drawn}) > 1, name
    assert all(0 < loop.crash_step < loop.steps for loop in drawn)


def test_no_loop_is_silently_wrong() -> None:
    with runner() as run:
        found = [try_loop(draw(seed), run) for seed in range(2, 2 + LOOPS)]
    assert [one.loop for one in found if one.outcome == "silent"] == []
    assert any(one.resumed > 0 for one in found)
