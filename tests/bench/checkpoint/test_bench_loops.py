"""Random training loops that crash come back bit-identical, or something was said by name."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from bench.checkpoint.loops.case import Loop, draw
from bench.checkpoint.loops.judging import Found, TrainingRun, judge
from bench.checkpoint.loops.trying import record, runner, try_loop
from bench.common import Results

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
    ended: dict[str, int] = STEP, save_at: str = "end", step: int = 3,
) -> Found:  # fmt: skip
    """``back``: the state that resume() gave, of ``step``; ``ended``: the reference's after it."""
    loop = replace(draw(1), save_at=save_at, crash_step=4)
    reference = {"state": {"model": 5}, "saved": {"3": STEP}, "ended": {"3": ended}}
    resumed = {"state": {"model": end}, "began": step, "step": step, "resumed": back}
    return judge(loop, reference, killed(said), TrainingRun(0, resumed, again))


def killed(said: str = "") -> TrainingRun:
    return TrainingRun(-signal.SIGKILL, None, said)


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


@pytest.mark.parametrize(
    ("crash_step", "step", "why"),
    [
        (3, 0, ""),
        (5, 0, "killed in step 5, it resumed at 0"),  # as if nothing had ever been saved
        (8, 3, "killed in step 8, it resumed at 3"),
        (4, 2, "killed in step 4, it resumed at 2"),  # not saved by any
        (3, 3, ""),
        (2, 3, "killed in step 2, it resumed at 3"),
    ],
)
def test_steps_that_are_lost_without_a_word_are_a_failure(
    crash_step: int, step: int, why: str
) -> None:
    reference = {"state": {"model": 5}, "saved": {"3": STEP}, "ended": {"0": STEP, "3": STEP}}
    resumed = {"state": {"model": 5}, "began": step, "step": step, "resumed": STEP}
    loop = replace(draw(1), save_at="end", crash_step=crash_step)
    found = judge(loop, reference, killed(), TrainingRun(0, resumed, ""))
    assert (found.outcome, found.why) == ("failed" if why else "identical", why)


REFUSAL: dict[str, Any] = {"refusal": "CheckpointError: step 3 does not fit"}
NAMED: dict[str, Any] = {"refusal": "TypeError: extra.when: a datetime cannot be saved"}
SLIP: dict[str, Any] = {"refusal": "TypeError: 'NoneType' object is not callable"}
OWN: dict[str, Any] = {"refusal": "CheckpointError: extra.ema does not take it: KeyError: 'n'"}
CALLED: dict[str, Any] = {"refusal": "TypeError: model() takes 1 positional argument"}
CAUGHT = "robust-slurm: rank 0: step 4 was not saved: KeyError: 7"
GONE = "robust-slurm: rank 0: step 4 was not saved: RuntimeError: the checkpoint store is gone"
UNUSABLE = "robust-slurm: rank 0: step 4 was not saved: TypeError: extra.when: a datetime"
CLOSED = "robust-slurm: step 4 and later ones are not saved: the Checkpointer is closed"
THREAD = "Exception in thread robust-copy:\nTraceback (most recent call last):"


@pytest.mark.parametrize(
    ("crashed", "again", "outcome", "why"),
    [
        (killed(), TrainingRun(0, REFUSAL, MODEL), "refused", ""),
        (killed(), TrainingRun(0, NAMED, ""), "refused", ""),
        (TrainingRun(0, NAMED, ""), None, "refused", ""),
        (killed(), TrainingRun(0, SLIP, MODEL), "failed", "resumed, it ended with 0: TypeError"),
        # A warning by name is no excuse for a run that dies:
        (killed(MODEL), TrainingRun(-signal.SIGALRM, None, MODEL), "failed", "resumed, it hung"),
        (killed(), TrainingRun(1, None, f"{MODEL}\nKeyError: 3"), "failed", "KeyError: 3"),
        (killed(), TrainingRun(-signal.SIGSEGV, None, EMA), "failed", "it ended with -11"),
        (killed(), TrainingRun(1, REFUSAL, ""), "failed", "it ended with 1"),
        (TrainingRun(1, None, EMA), None, "failed", "before its crash, it ended with 1"),
        (TrainingRun(-signal.SIGALRM, None, ""), None, "failed", "before its crash, it hung"),
        (killed(CAUGHT), TrainingRun(0, {}, ""), "failed", "before its crash, robust-slurm: rank"),
        (killed(), TrainingRun(0, {}, CAUGHT), "failed", "resumed, robust-slurm: rank 0: step 4"),
        # Nor is a refusal, in either run, an excuse for an error of our own:
        (killed(CAUGHT), TrainingRun(0, REFUSAL, ""), "failed", "before its crash, robust-slurm"),
        (killed(), TrainingRun(0, REFUSAL, CAUGHT), "failed", "resumed, robust-slurm: rank 0"),
        (TrainingRun(0, NAMED, CAUGHT), None, "failed", "before its crash, robust-slurm"),
        (killed(GONE), TrainingRun(0, REFUSAL, ""), "failed", "the checkpoint store is gone"),
        (killed(CLOSED), TrainingRun(0, REFUSAL, ""), "failed", "the Checkpointer is closed"),
        (killed(THREAD), TrainingRun(0, REFUSAL, ""), "failed", "Exception in thread robust-copy"),
        (killed(), TrainingRun(0, OWN, ""), "failed", "KeyError: 'n'"),
        (killed(), TrainingRun(0, CALLED, ""), "failed", "model() takes 1"),
        (killed(UNUSABLE), TrainingRun(0, REFUSAL, ""), "refused", ""),
    ],
)
def test_a_run_has_refused_by_our_own_error_only(
    crashed: TrainingRun, again: TrainingRun | None, outcome: str, why: str
) -> None:
    found = judge(draw(1), {"state": {}}, crashed, again)
    assert found.outcome == outcome and why in found.why
    assert found.by == ("error" if outcome == "refused" else "")


def test_the_outcomes_are_counted_and_the_bad_seeds_named() -> None:
    found = [
        judged("", end=5),
        judged(MODEL, back=STEP | {"model": 9}),
        judged("", back=STEP | {"model": 9}),
        judge(draw(7), {}, killed(), TrainingRun(0, REFUSAL, "")),
        judge(draw(8), {}, killed(), TrainingRun(-signal.SIGALRM, None, MODEL)),
    ]
    results = Results("checkpoint")
    record(results, found)
    assert {name: metric.median for name, metric in results.metrics.items()} == {
        "loops.identical": 1, "loops.refused": 2, "loops.silent": 1, "loops.failed": 1,
        "loops.refused.error": 1, "loops.refused.warning": 1, "loops.needless": 0,
    }  # fmt: skip
    assert results.settings["failed seeds"] == "8"
    assert str(results.settings["silent seeds"]).startswith("1 (model)")


def test_seeds_give_loops_of_all_kinds() -> None:
    drawn = [draw(seed, large=seed % 2 == 0) for seed in range(200)]
    assert drawn == [draw(seed, large=seed % 2 == 0) for seed in range(200)]
    for name in Loop.__dataclass_fields__:
        assert len({getattr(loop, name) for loop in drawn}) > 1, name
    assert all(0 < loop.crash_step < loop.steps for loop in drawn)


def test_no_loop_is_silently_wrong() -> None:
    with runner() as run:
        found = [try_loop(draw(seed), run) for seed in range(2, 2 + LOOPS)]
    assert [one for one in found if one.outcome in ("silent", "failed")] == []
    assert any(one.resumed > 0 for one in found)
