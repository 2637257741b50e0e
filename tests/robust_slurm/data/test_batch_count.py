"""A training that takes batches ahead of its steps is told from one that takes several a step."""

from __future__ import annotations

import pytest

from robust_slurm.data.batch_count import BatchCount


@pytest.mark.parametrize(
    ("each", "ahead", "prefetched", "began", "why"),
    [
        (1, 0, 0, 0, ""),
        (4, 0, 0, 7, ""),
        (1, 1, 0, 0, "2 batches taken for the first 1 step, and 1 for each later one: the"),
        (4, 2, 0, 7, "the training is 2 ahead"),
        (1, 1, 1, 3, ""),
        (1, 2, 1, 0, "pass prefetched=2"),
        (1, 0, 2, 0, "would read 2 again"),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_batches_are_counted_against_saves(
    each: int, ahead: int, prefetched: int, began: int, why: str, every: int
) -> None:
    count, said = BatchCount(prefetched), []
    for _ in range(ahead):
        count.took()
    for step in range(began + 1, began + 13):
        for _ in range(each):
            count.took()
        if step % every == began % every:
            said.append(count.saved_at(step, began))
    texts = [text for text in said if text]
    assert len(texts) == (1 if why else 0)
    if every == 1 or "batches taken" not in why:
        assert why in "".join(texts)


def test_a_change_of_the_number_of_batches_is_no_advance() -> None:
    count = BatchCount()
    for step, batches in enumerate([1, 4, 4, 4], 1):
        for _ in range(batches):
            count.took()
        assert count.saved_at(step, 0) == ""
