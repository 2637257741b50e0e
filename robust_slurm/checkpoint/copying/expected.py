"""Compare a finished copy with the part of the state that save() had time to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .portions import Portions, differing, sums, views
from .sample import TensorSample, on_host
from .slots import Slot


class Expected:
    """Two items of each tensor, and sums of a portion of them all, as save() found them."""

    def __init__(
        self, items: Sequence[torch.Tensor], order: Sequence[int], portions: Portions, turn: int
    ) -> None:
        """``items``, ``order``: of a ``TensorSample``. The sums are taken now; on a device, in its
        current stream, without waiting for it."""
        self._items, self._order = items, order
        self._portion, self._sums = portions.runs[turn], portions.take(turn)

    def unlike(self, slot: Slot) -> list[int]:
        """Return the indices of the tensors whose copies in ``slot.late`` differ, ascending."""
        if slot.sample is None or slot.sample.order != self._order:
            slot.sample = TensorSample(slot.late, self._order)
        found = set(slot.sample.differing(on_host(self._items), on_host(slot.sample.take())))
        if self._portion:
            saved = on_host(sums(views(slot.late, self._portion)))
            found.update(differing(self._portion, on_host(self._sums), saved))
        return sorted(found)
