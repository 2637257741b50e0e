"""The step that all ranks resume from, of those that their stores name. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def common_step(offered: Sequence[int]) -> int | None:
    """Return the step on disk to resume from; None: that in memory, or the newest that all read.

    ``offered``: of each rank -1, or twice the step, and 1 more where it is in memory. A rank
    without a store resumes from the others' step on disk. Raises ValueError if that is not one.
    """
    found = sorted(set(offered), reverse=True)
    if found[0] % 2 == 0 and found[1:] in ([], [-1]):
        return found[0] // 2
    if len(found) == 1:
        return None
    names = {n: f"step {n // 2} {'in memory' if n % 2 else 'on disk'}" for n in found if n >= 0}
    lost = "none, as its store gives no answer"
    told = (f"rank {offered.index(n)} (of {offered.count(n)}) {names.get(n, lost)}" for n in found)
    raise ValueError(f"the ranks were given different steps to resume from: {'; '.join(told)}")
