"""Count of the batches that a training takes for a step: it must not be ahead at a save (pure)."""

from __future__ import annotations

from robust_slurm.text import counted


class BatchCount:
    """Counts the batches that were handed out against the steps that were saved.

    Batches for a step are those between two saves. More than these before the first save, since
    the training began or resumed, have been taken and not used: the state would skip them.
    """

    def __init__(self, prefetched: int = 0) -> None:
        """``prefetched``: batches that the state leaves out."""
        self._prefetched = prefetched
        self._taken = 0
        self._first: tuple[int, int] | None = None  # steps since the beginning, and batches
        self._done = False

    def took(self) -> None:
        """Count a batch."""
        self._taken += 1

    def saved_at(self, step: int, began: int) -> str:
        """Note a save after ``step`` steps, of a training that began at step ``began``. Return, at
        the first save that shows it, by how many batches the training is ahead; else ""."""
        steps = step - began
        if self._done or steps <= 0:
            return ""
        if self._first is None:
            self._first = (steps, self._taken)
            return ""
        first, taken = self._first
        if steps <= first:
            return ""
        self._done = True
        each, rest = divmod(self._taken - taken, steps - first)
        more = taken - each * first - self._prefetched
        if rest or each < 1 or more == 0 or (more < 0 and not self._prefetched):
            return ""
        if more < 0:
            return (
                f"loader: prefetched={self._prefetched}, but the training is only "
                f"{self._prefetched + more} ahead of its steps: after a restart it would read "
                f"{-more} again. Give the number of batches that are taken and not used at save()"
            )
        return (
            f"loader: {counted(taken, 'batch', 'batches')} taken for the first "
            f"{counted(first, 'step')}, and {each} for each later one: the training is {more} "
            "ahead, and a restart skips as many. Take the next batch after save(), or pass "
            f"prefetched={self._prefetched + more} to data.Loader"
        )
