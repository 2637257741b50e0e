"""Snapshots as the stores hold them: the input of every plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..store.events import Holding


class Holder(NamedTuple):
    """One store and what it has."""

    store: str
    """Unique in the job."""
    node: str
    host: str
    port: int
    holdings: Sequence[Holding]


class UsableCopy(NamedTuple):
    """A usable holding and where it is."""

    place: Holder
    holding: Holding


Copies = dict[int, list[UsableCopy]]  # by owner
Sets = dict[tuple[int, int], Copies]  # by (step, epoch)
