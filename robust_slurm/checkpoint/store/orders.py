"""The orders of robust-srun to all ranks of a store, which last until the epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Collection

from robust_slurm.checkpoint.store.ranks import StoreRank


class Orders:
    """Gives orders to the ranks that are here, and repeats them to ranks that enrol later."""

    def __init__(self, ranks: Callable[[], list[StoreRank]]) -> None:
        """``ranks()``: all of the store."""
        self._ranks = ranks
        self._persist_at: set[int] = set()
        self._stand = -1
        self._first = 0
        self.every = 1

    def begin(self) -> None:
        """A new epoch begins."""
        self._persist_at.clear()
        self._stand = -1
        self.every, self._first = 1, 0

    @property
    def welcome(self) -> dict[str, int]:
        """The orders as part of the answer to a rank that enrols."""
        return {"stand": self._stand, "every": self.every, "first": self._first}

    def persists(self, step: int) -> bool:
        """True if the snapshots of this step go to the durable tier."""
        return step in self._persist_at

    def persist_at(self, step: int) -> None:
        """Have the snapshots of this step written. A rank without memory writes them itself."""
        self._persist_at.add(step)
        for rank in self._ranks():
            rank.tell({"op": "persist_at", "step": step})

    def repeat(self, rank: StoreRank, *, after: int) -> None:
        """Send a rank that enrols again the steps to write, those later than ``after``."""
        for step in sorted(step for step in self._persist_at if step > after):
            rank.tell({"op": "persist_at", "step": step})

    def unshare(self, ranks: Collection[int]) -> None:
        """Have those of these ranks that are here save all of their own state."""
        for rank in self._ranks():
            if rank.number in ranks:
                rank.tell({"op": "unshare"})

    def save_every(self, every: int, first: int) -> None:
        """Save only multiples of ``every`` from step ``first`` on, and what goes to disk."""
        self.every, self._first = every, first
        for rank in self._ranks():
            rank.tell({"op": "every", "every": every, "first": first})

    def stand_at(self, step: int) -> None:
        """Have the ranks wait after this step until another one is named; -1: for none."""
        self._stand = step
        for rank in self._ranks():
            rank.tell({"op": "stand", "step": step})
