"""The time that rank 0 has for itself when ranks start warm, all at once (pure)."""

from __future__ import annotations

from srun_wrapper.protocol.messages import RankStart

HEAD_START = 0.3
"""s by which warm rank 0's script may go ahead of the others': torch's ranks look for its store,
and one that comes before the store waits half a second or more until it looks again."""


def head_start(rank: RankStart) -> float:
    """Return the longest wait for rank 0's store, in s."""
    return HEAD_START if rank.rank else 0.0
