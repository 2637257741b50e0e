"""Ranks that spin while they wait for their GPU, and what tells them from ranks that work."""

from __future__ import annotations

import pytest
from test_pace import BUSY_IN_C, HANG, QUIET, SPINNING, WORKING, stepping

from srun_wrapper.job.pace import WorkSigns, judge
from srun_wrapper.protocol.messages import SlotActivity

READING = SlotActivity(0, "R", 1.0, 1 << 20, ("all_reduce (a.py:3)",))


BLIND = BUSY_IN_C  # py-spy may not look: only the CPU shows


@pytest.mark.parametrize(
    ("silent", "samples", "held", "hung"),
    [
        (312.0, (BLIND, BLIND, QUIET), {0: 311.0, 1: 310.5}, True),
        (312.0, (BLIND, QUIET, QUIET), {0: 311.0}, True),
        (12.0, (BLIND, BLIND, QUIET), {0: 11.0, 1: 11.0}, False),  # within the patience
        (312.0, (BLIND, BLIND, WORKING), {0: 311.0, 1: 311.0}, False),  # rank 2 evaluates
        (312.0, (BLIND, BLIND, QUIET), {0: 311.0}, False),  # rank 1 waits for its own GPU
        (312.0, (BLIND, BLIND, QUIET), {0: 311.0, 1: 0.3}, False),  # it came just now
        (312.0, (BLIND, BLIND, QUIET), {0: 390.0, 1: 311.0}, False),  # rank 0's is forgotten
        (312.0, (WORKING, BLIND, QUIET), {0: 311.0, 1: 311.0}, False),  # its stack moves
        (312.0, (BLIND, READING, QUIET), {0: 311.0, 1: 311.0}, False),
    ],
)
def test_ranks_that_spin_in_a_collective_wait(
    silent: float, samples: tuple[SlotActivity, ...], held: dict[int, float], hung: bool
) -> None:
    """CUDA spins while it waits: on GPUs a hang uses as much CPU as work."""
    p, now = stepping(0.5)
    signs, by_rank = WorkSigns(), dict(enumerate(samples))
    signs.note(now + silent, by_rank, 1.0)
    verdict = judge(p, now + silent, by_rank, 1.0, signs, held=held)
    assert verdict.hung is hung
    assert not hung or "ranks wait in a collective, and no other did anything" in verdict.why


def test_spinning_with_a_known_stack_is_no_work() -> None:
    p, now = stepping(0.5)
    signs, by_rank = WorkSigns(), {0: SPINNING, 1: SPINNING}
    signs.note(now + HANG, by_rank, 1.0)
    assert judge(p, now + HANG, by_rank, 1.0, signs).hung
