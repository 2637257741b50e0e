"""Every byte of the state is read once in so many saves, at about equal cost."""

from __future__ import annotations

import pytest
import torch

from robust_slurm.checkpoint.copying import portions as the_module
from robust_slurm.checkpoint.copying.portions import (
    CALL,
    LEAST,
    PORTIONS,
    WORD,
    Portions,
    Run,
    divide,
    portions_of,
    turn,
)


@pytest.mark.parametrize("every", [1, 2, 3, 10, 64, 100])
@pytest.mark.parametrize("count", [1, 7, PORTIONS])
def test_each_portion_has_its_turn_whichever_steps_are_saved(count: int, every: int) -> None:
    for began in (0, 10**6):
        saved = range(began, began + 4 * PORTIONS * every, every)
        assert {turn(step, count) for step in saved} == set(range(count))


@pytest.mark.parametrize(
    ("words", "count", "expected"),
    [
        ([], 2, [[], []]),
        ([0, 0], 2, [[], []]),
        ([6], 3, [[Run(0, 0, 2)], [Run(0, 2, 4)], [Run(0, 4, 6)]]),
        ([1, 0, 3], 2, [[Run(0, 0, 1), Run(2, 0, 1)], [Run(2, 1, 3)]]),
        ([1], 3, [[], [], [Run(0, 0, 1)]]),
        ([2, 2], 1, [[Run(0, 0, 2), Run(1, 0, 2)]]),
    ],
)
def test_portions_are_equal(words: list[int], count: int, expected: list[list[Run]]) -> None:
    assert divide(words, count) == expected


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 1),
        ([0, 5], 1),
        ([(LEAST - CALL) // WORD], 1),
        ([(LEAST - CALL) // WORD + 1], 2),
        ([1] * (2 * LEAST // CALL), 3),  # small ones take the time of the call
        ([LEAST] * 100, PORTIONS),
    ],
)
def test_a_small_state_is_read_in_fewer_portions(words: list[int], count: int) -> None:
    assert portions_of(words) == count


@pytest.mark.parametrize("words", [[5], [100, 1, 0, 31], [7] * 50, [1 << 40, 3]])
def test_each_word_is_read_once(words: list[int]) -> None:
    found = divide(words, PORTIONS)
    sizes = [sum(run.stop - run.start for run in portion) for portion in found]
    assert len(found) == PORTIONS and max(sizes) - min(sizes) <= 1
    runs = [run for portion in found for run in portion]
    assert runs == sorted(runs)
    for owner, size in enumerate(words):
        ends = [(run.start, run.stop) for run in runs if run.owner == owner]
        assert [start for start, _ in ends] == [0, *[stop for _, stop in ends]][: len(ends)]
        assert not size or ends[-1][1] == size


def test_what_torch_cannot_read_as_words_is_left_out() -> None:
    tensors = [torch.ones(8, 8).t(), torch.ones(9)[1:], torch.ones(2, 8), torch.tensor(1.0)]
    runs = [run for portion in Portions(tensors).runs for run in portion]
    assert {run.owner for run in runs} == {2}


def test_sums_are_of_what_the_tensors_hold_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(the_module, "LEAST", 1)
    portions = Portions([torch.zeros(2 * PORTIONS, dtype=torch.int32)])
    tensor = portions._tensors[0]
    assert portions.take(3)[0].tolist() == [0]
    tensor.view(torch.int64)[3] = 5
    assert portions.take(3)[0].tolist() == [5]
    assert portions.take(4)[0].tolist() == [0]
