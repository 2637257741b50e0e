"""The files that a store's ranks are restored from, and the wait for those that are missing.

Before an epoch begins, robust-srun brings the files to the nodes where it expects the ranks. A
launcher may number the nodes otherwise (torchrun with c10d): then robust-srun learns a rank's node
when the rank enrols, and has its store fetch the missing files before it welcomes the rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from robust_slurm.checkpoint.store.door import Message, RankConnection
from robust_slurm.checkpoint.store.events import FetchOutcome, Restore
from robust_slurm.checkpoint.store.shelf import Shelf

ORDER = 15.0  # s to wait for the order to fetch
TELL = 5.0  # s between two messages to a rank that waits: its time-out is longer


class Awaited:
    """The source from which the ranks of the running epoch are restored."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._change = threading.Condition()
        self._epoch = 0
        self._fetching = 0
        self._restore: Restore | None = None

    def begin(self, epoch: int, restore: Restore | None) -> None:
        with self._change:
            self._epoch = epoch
            self._restore = restore
            self._change.notify_all()

    def lacks(self, rank: int) -> bool:
        """True if the plan has no file for this rank, or not all that its snapshot needs."""
        restore = self._restore
        if restore is None or restore.tier != "memory":
            return False
        owner = restore.origins.get(rank, rank)
        record = self._shelf.get(restore.shards.get(owner, ""))
        needs = record.needs if record is not None else ()
        return not restore.shards.keys() >= {owner, *needs}

    def plan(self, rank: int) -> Message | None:
        """Return the restore plan for a rank that enrols; None: there is none."""
        restore = self._restore
        if restore is None:
            return None
        shards = {str(owner): file for owner, file in restore.shards.items()}
        plan = {"step": restore.step, "tier": restore.tier, "shards": shards}
        if rank in restore.origins:
            plan |= {"origin": restore.origins[rank], "anew": rank in restore.anew}
        return plan

    def wait(self, connection: RankConnection, rank: int, epoch: int) -> None:
        """Wait until the rank's files are here, no order to fetch them came, or the epoch ended."""
        give_up_at = time.monotonic() + ORDER
        while True:
            with self._change:
                if self._epoch != epoch or not self.lacks(rank):
                    return
                now = time.monotonic()
                if self._fetching:
                    give_up_at = now + ORDER  # if it brings nothing, another may follow
                elif now >= give_up_at:
                    return
                self._change.wait(TELL)
            connection.send({"op": "wait"})

    def fetch(self, work: Callable[[], Sequence[FetchOutcome]]) -> list[FetchOutcome]:
        """Run a fetch, then wake the ranks that wait for its files."""
        outcomes: list[FetchOutcome] = []
        with self._change:
            self._fetching += 1
        try:
            outcomes += work()
            return outcomes
        finally:
            with self._change:
                self._fetching -= 1
                restore = self._restore
                if restore is not None:
                    here = {o.owner: o.file for o in outcomes if o.ok and o.step == restore.step}
                    self._restore = restore._replace(shards=restore.shards | here)
                self._change.notify_all()
