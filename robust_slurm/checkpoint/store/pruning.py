"""Choose the snapshots to remove: those that are superseded, or give way to others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from robust_slurm.checkpoint.store.events import WantedSnapshot
from robust_slurm.checkpoint.store.ranks import StoreRank
from robust_slurm.checkpoint.store.reserve import free
from robust_slurm.checkpoint.store.shelf import FETCHED, OWN, Shelf, ShelfRecord

USELESS = 4  # saves; a snapshot so far behind the store's ranks is part of no common step


def superseded(
    records: Iterable[ShelfRecord], here: Mapping[int, int], everywhere: int, oldest: int
) -> Callable[[ShelfRecord], bool]:
    """Return the test for snapshots that can be part of no common step any more. Pure.

    ``here``: ranks of this store that are connected, with their newest steps. ``everywhere``: the
    newest step that all ranks of the job have. ``oldest``: snapshots up to this step go even
    without a report that all ranks have a newer one, as all had the time to save it.
    """
    latest: dict[int, int] = {}
    for record in records:
        if record.kind == OWN:
            latest[record.owner] = max(record.step, latest.get(record.owner, -1))

    def useless(record: ShelfRecord) -> bool:
        if record.kind == FETCHED:
            return record.step < everywhere or record.step <= oldest
        if record.kind == OWN and record.owner not in here:
            return latest.get(record.owner, -1) <= oldest
        return False

    return useless


def give_way(
    shelf: Shelf, ranks: Collection[StoreRank], wanted: Collection[WantedSnapshot]
) -> None:
    """Make room for the snapshots to be fetched, if memory is short.

    Without them neither this step nor an older one can be restored, whatever else is kept.
    ``ranks``: those of the store; none of them runs.
    """
    records = shelf.all()
    missing = {(w.owner, w.step) for w in wanted} - {(r.owner, r.step) for r in records}
    need = len(missing) * max((record.size for record in records), default=0)
    held = {(rank.number, slot) for rank in ranks for slot in rank.held}
    steps = {each.step for each in wanted}

    def lacks() -> bool:
        return need > free(str(shelf.directory))

    def useless(record: ShelfRecord) -> bool:
        is_own = record.kind == OWN and (record.owner, record.slot) not in held
        return is_own and record.step not in steps

    if lacks():
        for rank in ranks:
            shelf.remove_unknown(rank.number)
        shelf.drop(lambda record: useless(record) and record.step > max(steps))
    if lacks():
        shelf.drop(useless)
