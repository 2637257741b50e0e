"""A lane as the planner and the constructor see it, wherever it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from robust_slurm.data.lanes.position import Position
    from robust_slurm.data.sample import Meta, Ref, Sample


class Feed(Protocol):
    """One lane: its samples' metadata in order, and the samples that this node wants of it.

    Local (``lanes/local.py``: a thread reads ahead) or of another node (``exchange/``). All
    feeds of a lane give the same samples in the same order from the same position. One that has
    samples in this process may also have ``ready`` and ``give_back``, as LocalFeed: the engine then
    gets several of them at once.
    """

    def seek(self, position: Position) -> None:
        """Go on from ``position``; forget what was read."""

    def next(self) -> tuple[Meta, Position]:
        """Return the next sample's metadata and the position after it. Waits for it.
        Raises DataError (SourceStalled if ``patience`` is over)."""

    def take(self, refs: Iterable[Ref]) -> list[Sample]:
        """Return these samples, of those that ``next`` has given, and forget them."""

    def drop(self, refs: Iterable[Ref]) -> None:
        """Forget these: other nodes' ranks have them."""

    def again(self, refs: Iterable[Ref]) -> list[Sample]:
        """Read single samples again by their names: those that a resumed step has carried."""

    def close(self) -> None:
        """Stop reading."""
