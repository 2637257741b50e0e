"""Compare a finished copy with the items of each tensor that save() had time to read."""

from __future__ import annotations

from .sample import TensorSample, on_host
from .slots import Slot


class Expected:
    """Two items of each tensor, as save() found them."""

    def __init__(self, sample: TensorSample) -> None:
        """The items are read now; on a device, in its current stream, without waiting for it."""
        self._order, self._items = sample.order, sample.take()

    def unlike(self, slot: Slot) -> list[int]:
        """Return the indices of the tensors whose copies in ``slot.late`` differ, ascending."""
        if slot.sample is None or slot.sample.order != self._order:
            slot.sample = TensorSample(slot.late, self._order)
        return slot.sample.differing(on_host(self._items), on_host(slot.sample.take()))
