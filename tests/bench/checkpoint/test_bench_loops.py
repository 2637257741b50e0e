"""Random training loops that crash come back bit-identical, or something was said by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bench.checkpoint.loops.case import Found, Loop, draw, judge, runner, try_loop

pytestmark = pytest.mark.slow

LOOPS = 2
"""``python -m bench.checkpoint --case loops`` runs 200."""


STEP = {"model": 1, "ema": 1, "gradients": 1}
LATER = {"model": 2, "ema": 2, "gradients": 1}
MODEL = "robust-slurm: rank 0: model.0.weight, model.2.bias and 4 more changed before the next"
EMA = "robust-slurm: rank 0: extra.ema changed between save(3) and the next optimizer step"
GRADIENTS = (
    "robust-slurm: rank 0: save(3) comes before an optimizer step has used the gradients of "
    "model.0.weight, model.2.bias: gradients are not saved"
)


def judged(
    said: str, again: str = "", *, end: int = 6, back: dict[str, int] = STEP,
    ended: dict[str, int] = STEP, save_at: str = "end",
) -> Found:  # fmt: skip
    """``back``: the state that resume() gave; ``ended``: the reference's after that step."""
    loop = replace(draw(1), save_at=save_at)
    reference = {"state": {"model": 5}, "saved": {"3": STEP}, "ended": {"3": ended}}
    resumed = {"state": {"model": end}, "began": 3, "step": 3, "resumed": back}
    return judge(loop, reference, resumed, said, again)


@pytest.mark.parametrize(
    ("back", "ended", "said", "outcome"),
    [
        ({}, {}, EMA, "silent"),  # nothing that is compared differs
        ({"model": 9}, {}, MODEL, "refused"),
        ({"model": 9}, {}, "", "silent"),
        ({"model": 9}, {}, EMA, "silent"),
        ({"model": 9}, {}, GRADIENTS, "silent"),  # of the model's parameters, not the parameters
        ({"model": 9}, {}, MODEL.removeprefix("robust-slurm: "), "silent"),
        ({}, {"ema": 2}, EMA, "refused"),
        ({}, {"ema": 2}, MODEL, "silent"),
        ({"model": 9}, {"ema": 2}, MODEL, "silent"),
        ({"model": 9}, {"ema": 2}, f"{MODEL}\n{EMA}", "refused"),
        ({"gradients": 0}, {}, GRADIENTS, "refused"),
    ],
)
def test_each_object_that_differs_must_be_named(
    back: dict[str, int], ended: dict[str, int], said: str, outcome: str
) -> None:
    found = judged(said, back=STEP | back, ended=STEP | ended)
    assert found.outcome == outcome
    assert not found.needless


def test_gradients_that_are_not_used_name_the_step_that_comes_after_save() -> None:
    assert judged(GRADIENTS, ended=LATER, save_at="early").outcome == "refused"
    assert judged(GRADIENTS, ended=LATER, save_at="micro").unnamed == ("ema", "model")
    assert judged(GRADIENTS, ended=LATER, back=STEP | {"model": 9}, save_at="early").unnamed == (
        "model",
    )


def test_what_came_back_wrong_must_have_been_named_before() -> None:
    assert judged("", MODEL, back=STEP | {"model": 9}).outcome == "silent"
    assert judged("", EMA, ended=STEP | {"ema": 2}).outcome == "refused"


def test_what_comes_to_the_same_is_identical() -> None:
    assert judged("", end=5).outcome == judged(EMA, end=5).outcome == "identical"
    assert judged(EMA, end=5).needless and not judged("", end=5).needless


def test_a_run_that_does_not_go_on_has_refused() -> None:
    found = judge(draw(1), {"state": {}}, None, "", "CheckpointError: step 3 does not fit")
    assert found.outcome == "refused"


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
