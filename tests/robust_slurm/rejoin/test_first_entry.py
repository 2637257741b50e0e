"""A rank that stays finds what a new one does; what it cannot put back, it notices."""

from __future__ import annotations

import contextlib
import random

import pytest

torch = pytest.importorskip("torch")
from robust_slurm.rejoin.entry import FirstEntry  # noqa: E402


def drawn() -> list[float]:
    return [random.random(), torch.rand(()).item()]


def test_random_numbers_begin_anew() -> None:
    """A split of the data that is drawn before resume() is the same on all ranks."""
    first = FirstEntry()
    numbers = drawn()
    first.check()
    first.put_back()
    assert drawn() == numbers


@pytest.mark.parametrize("block", [torch.no_grad, lambda: torch.autocast("cpu")])
def test_a_block_that_was_left_without_its_end_is_found(block: object) -> None:
    first = FirstEntry()
    assert callable(block)
    with contextlib.ExitStack() as left:
        left.enter_context(block())
        with pytest.raises(RuntimeError):
            first.check()
    first.check()
