"""Compares a finished copy with what save() found, as far as save() has the time to look."""

from __future__ import annotations

from .portions import Portions, differing, sums, views
from .sample import Sample, on_host
from .slots import Slot


class Expected:
    """Two items of each tensor, and sums of a portion of them all, as save() found them."""

    def __init__(self, sample: Sample, portions: Portions, turn: int) -> None:
        """Read them now; on a device, in the order of its current stream, without a wait."""
        self._sample, self._portion = sample, portions.runs[turn]
        self._items, self._sums = sample.take(), portions.take(turn)

    def unlike(self, slot: Slot) -> list[int]:
        """Indices of the tensors of which ``slot.late`` holds something else, ascending."""
        order = self._sample.order
        if slot.sample is None or slot.sample.order != order:
            slot.sample = Sample(slot.late, order)
        items, there = on_host(self._items), on_host(slot.sample.take())
        found = set(self._sample.differing(items, there))
        if self._portion:
            saved = on_host(sums(views(slot.late, self._portion)))
            found.update(differing(self._portion, on_host(self._sums), saved))
        return sorted(found)
