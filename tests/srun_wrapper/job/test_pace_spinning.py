"""Ranks that spin while they wait for their GPU, and what tells them from ranks that work."""

from __future__ import annotations

import pytest
from test_pace import QUIET, SPINNING, WORKING, stepping

from srun_wrapper.job.pace import judge
from srun_wrapper.protocol.messages import SlotActivity

READING = SlotActivity(0, "R", 1.0, 1 << 20, ("all_reduce (a.py:3)",))


@pytest.mark.parametrize(
    ("silent", "samples", "held", "hung"),
    [
        (12.0, (SPINNING, SPINNING, QUIET), {0: 11.0, 1: 10.5}, True),
        (12.0, (SPINNING, QUIET, QUIET), {0: 11.0}, True),
        (9.0, (SPINNING, SPINNING, QUIET), {0: 9.0, 1: 9.0}, False),  # within the limit
        (12.0, (SPINNING, SPINNING, WORKING), {0: 11.0, 1: 11.0}, False),  # rank 2 evaluates
        (12.0, (SPINNING, SPINNING, SPINNING), {0: 11.0, 1: 11.0}, False),  # its GPU computes
        (12.0, (SPINNING, SPINNING, QUIET), {0: 11.0}, False),  # rank 1 waits for its own GPU
        (12.0, (SPINNING, SPINNING, QUIET), {0: 11.0, 1: 0.3}, False),  # it came just now
        (12.0, (SPINNING, SPINNING, QUIET), {0: 90.0, 1: 11.0}, False),  # rank 0's is forgotten
        (12.0, (WORKING, SPINNING, QUIET), {0: 11.0, 1: 11.0}, False),  # its stack moves
        (12.0, (SPINNING, SPINNING), {0: 11.0, 1: 11.0}, False),  # all in: a long computation
        (12.0, (SPINNING, READING, QUIET), {0: 11.0, 1: 11.0}, False),
    ],
)
def test_ranks_that_spin_in_a_collective_wait(
    silent: float, samples: tuple[SlotActivity, ...], held: dict[int, float], hung: bool
) -> None:
    """CUDA spins while it waits: on GPUs a hang uses as much CPU as work."""
    p, now = stepping(0.5)
    verdict = judge(p, now + silent, dict(enumerate(samples)), 1.0, 0, 0.0, held=held)
    assert verdict.hung is hung
    assert not hung or "ranks wait in a collective, and no other did anything" in verdict.why
