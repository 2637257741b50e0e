"""A dataloader that is shorter than others of an epoch, and begins again within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from robust_slurm.integrations.reader import Reader


def cycled(reader: Reader) -> Iterator[tuple[int, bool]]:
    """Yield batches as Lightning's CombinedLoader takes them, and whether a pass has ended."""
    iterator, ended = iter(reader), False
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            iterator, ended = iter(reader), True
            batch = next(iterator)
        yield int(batch), ended


@pytest.mark.parametrize("done", [2, 3, 5, 6, 7])  # 3: a pass's end
def test_it_goes_on_where_it_was_saved(done: int) -> None:
    def made() -> Reader:
        numbers: Any = range(3)
        return Reader(DataLoader(numbers, batch_size=1), lambda _: None)

    before, after = made(), made()
    expected = [(number % 3, number >= 3) for number in range(9)]
    stepped = cycled(before)
    assert [next(stepped) for _ in range(done)] == expected[:done]
    after.resume(before.position(0))
    stepped = cycled(after)
    assert [next(stepped) for _ in range(9 - done)] == expected[done:]
