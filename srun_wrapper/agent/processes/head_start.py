"""The time that rank 0 has for itself when ranks start warm, all at once (pure)."""

from __future__ import annotations

from srun_wrapper.protocol.messages import RankStart

HEAD_START = 0.15
"""s by which warm rank 0's script goes ahead of the others': torch's ranks look for its store, and
one that comes before the store waits half a second or more until it looks again."""
HEAD_START_BESIDE = 0.3
"""On its own node, where they see that there is a store, and go on at once."""


def head_start(rank: RankStart) -> float:
    """Return the longest wait for rank 0, in s. On its node, rank and local rank are equal."""
    if rank.rank == 0:
        return 0.0
    return HEAD_START_BESIDE if rank.rank == rank.local else HEAD_START
