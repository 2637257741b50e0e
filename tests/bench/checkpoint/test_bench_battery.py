"""The battery's judge tells the outcomes apart, and the battery runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench.checkpoint.battery.case import Kind, decode, encode, variants
from bench.checkpoint.battery.judging import Ended, judge
from bench.checkpoint.battery.trying import battery, record
from bench.common import Results

KIND = Kind("lookahead", "optimizers", r"\boptimizer\b", also=("warned",), unseeable="closure")
VARIANT = variants(KIND)[0]
GOOD, OTHER = {"0: weight": "1"}, {"0: weight": "2"}
NAMED = "robust-slurm: rank 0: optimizer: slow weights are not saved"
ELSE = "robust-slurm: rank 0: extra.ema changed between save(3) and the next step"
NOTE = "robust-slurm: rank 0: saved by 1 rank, loaded by 2: random number generators start anew"
BUFFERS = (
    "robust-slurm: rank 0: saved by 2 ranks, loaded by 1: model.mean differed between the ranks; "
    "all go on with that of rank 0"
)
SKIPPED = "robust-slurm: rank 0: step 4 was not saved: KeyError: 7"
TABLE = "## What no library can see\n\n| state | do |\n|---|---|\n| a count in a closure | x |\n"


def killed(*said: str) -> Ended:
    return Ended(killed=True, said=said, kept=GOOD)


def again(
    state: dict[str, str] = GOOD, *said: str, began: int = VARIANT.kill, error: str = ""
) -> Ended:
    return Ended(state=state, said=said, began=began, kept=state, error=error, refused=bool(error))


@pytest.mark.parametrize(
    ("crashed", "resumed", "docs", "outcome"),
    [
        (killed(), again(), "", "identical"),
        (killed(NAMED), again(), "", "needless_warnings"),
        (killed(), again(OTHER), "", "silent"),
        (killed(ELSE), again(OTHER), "", "silent"),
        (killed(NAMED), again(OTHER), "", "warned"),
        (killed(), again(OTHER, NAMED), "", "warned"),
        (killed(), again({}), "", "silent"),
        (killed(), again(OTHER), TABLE, "unseeable"),
        (killed(), again(OTHER), TABLE.replace("closure", "drawer"), "silent"),
        (killed(), again(OTHER), "A closure.\n", "silent"),  # no row of that table
        (killed(), again(began=0), "", "silent"),  # all steps are lost: the end is the same
        (killed("robust-slurm: rank 0: nothing is saved: no room"), again(began=0), "", "warned"),
        (killed(), again(error="CheckpointError: step 3 does not fit"), "", "refused"),
        (killed(), again(error="TypeError: optimizer: it is wrapped"), "", "refused"),
        (killed(), again(error="RuntimeError: a and b must have the same size"), "", "raw_errors"),
        (killed(), again(error="CheckpointError: no: KeyError: 'n'"), "", "raw_errors"),
        (killed(SKIPPED), again(), "", "raw_errors"),
        (killed(), Ended(hung=True), "", "raw_errors"),
        (Ended(state=GOOD), None, "", "raw_errors"),  # it was not killed
        (Ended(error="TypeError: optimizer: no", refused=True), None, "", "refused"),
        (Ended(error="TypeError: optimizer: no"), None, "", "raw_errors"),  # in the script's step
    ],
)
def test_the_outcomes_are_told_apart(
    crashed: Ended, resumed: Ended | None, docs: str, outcome: str
) -> None:
    assert judge(VARIANT, Ended(state=GOOD), crashed, resumed, docs).outcome == outcome


def test_on_other_ranks_the_state_after_resume_is_what_was_saved() -> None:
    (variant,) = variants(Kind("k", "ranks", "optimizer", ranks=((1, 2),), variants=1))
    began = variant.kill
    assert judge(variant, Ended(), killed(), again(began=began)).outcome == "identical"
    assert judge(variant, Ended(), killed(), again(OTHER, began=began)).outcome == "silent"
    # True of each such resume, so that it is neither needless nor the name of what differs:
    for note in (NOTE, BUFFERS):
        resumed = again(GOOD, note, began=began)
        assert judge(variant, Ended(), killed(), resumed).outcome == "identical"
    assert judge(variant, Ended(), killed(), again(OTHER, NOTE, began=began)).outcome == "silent"
    assert judge(variant, Ended(), killed(), again(OTHER, NAMED, began=began)).outcome == "warned"


def test_a_hazard_may_be_named_at_any_moment_of_a_crash() -> None:
    (variant, *_) = variants(Kind("k", "f", "optimizer", hazard=True))
    good = Ended(state=GOOD)
    resumed = again(began=variant.kill)
    assert judge(variant, good, killed(NAMED), resumed).outcome == "warned"
    assert judge(variant, good, killed(ELSE), resumed).outcome == "needless_warnings"
    assert judge(variant, good, killed(), resumed).outcome == "identical"


def test_what_must_be_identical_and_is_warned_of_is_unexpected() -> None:
    verdicts = [
        judge(variants(kind)[0], Ended(state=GOOD), killed(NAMED), again(OTHER))
        for kind in (KIND, Kind("sgd", "optimizers", "optimizer"))
    ]
    results = Results("checkpoint")
    record(results, verdicts)
    assert results.metrics["battery.warned"].median == 2
    assert results.metrics["battery.unexpected"].median == 1
    assert [each["kind"] for each in results.lists["battery"]] == ["lookahead", "sgd"]


def test_variants_follow_from_their_seed() -> None:
    kind = Kind("k", "f", "x", options=("a", "b"), ranks=((1, 1), (1, 2)), variants=9)
    drawn = variants(kind, 1)
    assert drawn == variants(kind, 1) != variants(kind, 2)
    assert len(drawn) == 12 and {(v.option, v.after) for v in drawn} == {
        ("a", 1), ("a", 2), ("b", 1), ("b", 2)
    }  # fmt: skip
    assert len({v.kill for v in drawn}) > 1 and len({v.moment for v in drawn}) > 1
    assert [decode(encode(each)) for each in drawn] == drawn
    assert len(variants(kind, 1, quick=True)) == 1


@pytest.mark.slow
def test_two_kinds_run() -> None:
    results = Results("checkpoint", quick=True)
    kinds = ("read_back", "generator_in_a_closure")
    found = battery(results, lambda text: None, only=kinds, processes=1)
    assert sorted(one.variant.kind.name for one in found) == sorted(kinds)
    outcomes = {one.variant.kind.name: one.outcome for one in found}
    assert outcomes["read_back"] == "identical"
    # Nobody hands that generator over: it differs, and is said so, documented, or silent.
    assert outcomes["generator_in_a_closure"] in ("silent", "unseeable", "warned")


@pytest.mark.slow
def test_a_step_at_which_replicas_differ_is_not_resumed() -> None:
    results = Results("checkpoint", quick=True)
    (one,) = battery(results, lambda text: None, only=("post_local_sgd",), processes=1)
    assert one.outcome == "warned" and any("do not hold the same" in text for text in one.said)
