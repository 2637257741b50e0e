"""bench.recovery --cuda: what can be seen of it without a GPU and a lab."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from bench.common import BenchError, Results
from bench.recovery import cuda


def test_a_step_that_was_computed_otherwise_is_found() -> None:
    true = {1: {"1 0x1p0 7"}, 2: {"2 0x1p-1 8"}}
    assert cuda.differing(dict(true), true) == []
    twice = {1: {"1 0x1p0 7"}, 2: {"2 0x1p-1 8", "2 0x1p-1 9"}}  # done again, and otherwise
    assert cuda.differing(twice, true) == [2]
    assert cuda.differing({3: {"3 0x1p0 1"}}, true) == [3]


def test_no_step_at_all_proves_nothing() -> None:
    with pytest.raises(BenchError, match="no job has noted a step"):
        cuda.same(Results("recovery"), None, "cpu", {"rejoin": {}}, {})  # type: ignore[arg-type]


def test_the_loss_that_is_furthest_off_counts() -> None:
    true = {1: {"1 0x1p0 7"}, 2: {"2 0x1p-1 8"}}
    twice = {1: {"1 0x1p0 6"}, 2: {"2 0x1p-1 8", "2 0x1.8p-1 9"}, 3: {"3 0x1p9 1"}}
    assert cuda.apart(twice, true) == 0.5
    assert cuda.apart(dict(true), true) == 0.0
    assert cuda.apart({2: {"2 nan 8", "2 0x1p-1 8"}}, true) == math.inf
