"""The outcome of each of a replay's groups, the time to replay at all, and the words."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from health.active.coordinator.replay import ReplayVerdict, Round, groups, layout
from robust_slurm.record import NotFinite
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.model import Node, Rank
from srun_wrapper.replay.outcome import GroupResult, compare, group_result, read
from srun_wrapper.replay.replaying import due

STEPS = 3


# -- one group


def rank(number: int, **known: Any) -> Rank:
    node = cast(Node, SimpleNamespace(name=f"n{number}"))
    found = Rank(number, node, 0)
    for name, value in known.items():
        setattr(found, name, value)
    return found


DONE: dict[str, Any] = {"exit": (0, 0), "beats": STEPS, "loss": 0.5}


@pytest.mark.parametrize(
    ("ranks", "all_beat", "expected"),
    [
        ([{}, {}], True, None),  # starting
        ([{"beats": 3}, {"beats": 2}], True, None),
        ([{"beats": 3}, {"beats": 4}], True, ("good", "")),
        ([DONE, DONE], True, ("good", "")),
        ([DONE, {"exit": (0, 0)}], False, ("good", "")),
        ([{"beats": 3}, {}], True, None),  # it tells steps, too: it may still be starting
        ([{"beats": 3}, {}], False, ("good", "")),  # as in the job, only rank 0 tells
        ([{"exit": (0, 0)}, {"beats": 2}], False, None),
        ([{"exit": (0, 0)}, {}], False, None),
        ([{"exit": (0, 0)}, {"exit": (0, 0)}], False, ("good", "")),  # no steps at all
        ([DONE, {"exit": (3, 0)}], True, ("bad", "n1: exit code 3")),
        ([{"exit": (0, 9)}, {}], True, ("bad", "n0: killed by SIGKILL")),
        ([{"exit": (0, 10)}, {}], True, ("unknown", "n0: ended by SIGUSR1")),  # somebody sent it
        ([{}, {"beats": 1, "loss": math.nan}], True, ("bad", "n1: loss nan")),
        ([DONE, DONE | {"loss": -math.inf}], True, ("bad", "n1: loss -inf")),
        ([{}, {"nan": NotFinite(1, math.inf, 0)}], True, ("bad", "n1: loss inf")),
    ],
)
def test_looks(ranks: list[dict[str, Any]], all_beat: bool, expected: Any) -> None:
    own = [rank(number, **known) for number, known in enumerate(ranks)]
    found = group_result(own, STEPS, all_beat=all_beat, nan=True, sent={10})
    assert (found and (found.result, found.why)) == expected


def test_losses_that_are_to_be_ignored() -> None:
    own = [rank(0, beats=3, loss=math.nan)]
    found = group_result(own, STEPS, all_beat=True, nan=False, sent=())
    assert found is not None and found.result == "good"


def test_losses_count_after_the_very_step() -> None:
    for beats, losses in ((3, ((1, (0.5).hex()),)), (4, None)):
        own = [rank(0, beats=beats), rank(1, beats=beats, loss=0.5)]
        found = group_result(own, STEPS, all_beat=True, nan=True, sent=())
        assert found is not None and found.losses == losses


def told(*losses: float | None) -> dict[int, GroupResult]:
    return {
        number: GroupResult("good", losses=None if loss is None else ((0, loss.hex()),))
        for number, loss in enumerate(losses)
    }


@pytest.mark.parametrize(
    ("losses", "bad", "says"),
    [
        ((0.5, 0.5, 0.5), [], ""),
        ((0.5, 0.5000000000000001, 0.5), [1], ""),
        ((0.5, 0.25), [], "no more than 1 agree"),
        ((0.5, None, 0.25), [], "losses of 1 groups are not compared"),
        ((), [], ""),
    ],
)
def test_losses_are_compared_to_the_bit(losses: Any, bad: list[int], says: str) -> None:
    outcomes = told(*losses)
    assert says in compare(outcomes) or says == compare(outcomes)
    assert [number for number, o in outcomes.items() if o.result == "bad"] == bad


# -- when, and in words


def crash(tail: str = "RuntimeError: boom", cause: Any = "unknown", launched: bool = True) -> Any:
    root = Failure("crash", 1.0, 0.0, "n1", 1, 1, None, tail, launched)
    return Diagnosis("crash", cause, (), (), "s", root)


@pytest.mark.parametrize(
    ("diagnosis", "failures", "blamed", "replayed", "expected"),
    [
        (crash(), 2, (), False, True),
        (crash(cause="user"), 2, (), False, True),
        (crash(), 1, (), False, False),
        (crash(), 2, (), True, False),
        (crash(), 2, ("n1",), False, False),
        (crash(cause="node"), 2, (), False, False),
        (crash(launched=False), 2, (), False, False),
        (crash("NameError: name 'x' is not defined"), 2, (), False, False),
    ],
)
def test_due(
    diagnosis: Diagnosis, failures: int, blamed: Any, replayed: bool, expected: bool
) -> None:
    assert due(diagnosis, failures, blamed, replayed) is expected


def test_words() -> None:
    cut = layout(8, 2)
    names = [f"n{x}" for x in range(8)]
    first = Round(groups(cut, 0), frozenset({1}))
    second = Round(groups(cut, 1), frozenset({1}))
    whys = [{1: "n2: loss nan"}, {1: "n2: loss nan"}]
    found = read(ReplayVerdict((2,), (), ()), [first, second], whys, names, "")
    assert found.named["n2"][0] == "failed in replay 1 with n3: n2: loss nan"
    assert found.lines[0] == "2 replays: n2 bad"
    found = read(ReplayVerdict((), (2, 3), ()), [first], whys, names, "no group failed in 2 rounds")
    assert found.lines == ("1 replay named no node: no group failed in 2 rounds; it may be n2,n3",)
    found = read(
        ReplayVerdict((), (), ()), [first._replace(bad=frozenset())] * 2, whys, names, "quiet"
    )
    assert "more than 78% of replays" in found.lines[0] and found.named == {}
    every = first._replace(bad=frozenset(range(4)))
    found = read(
        ReplayVerdict((), (2, 3), ()), [every], [{0: "n0: exit code 1"}], names, "all fail"
    )
    assert found.lines == ("1 replay named no node: all fail (n0: exit code 1)",)
