"""A sample, and its name: what sources give, lanes order, and the planner divides."""

from __future__ import annotations

from typing import Any, NamedTuple


class Ref(NamedTuple):
    """The name of one sample: which record of which part, in which pass over its source.

    ``piece``: a document longer than a row is cut into pieces, numbered from 0.
    """

    source: str
    lane: int
    epoch: int
    part: int  # index into the source's parts in their fixed order
    record: int  # index into the part's records in the file's order
    piece: int = 0

    @property
    def whole(self) -> Ref:
        """The name of the sample that this is a piece of."""
        return self._replace(piece=0) if self.piece else self


class Meta(NamedTuple):
    """The metadata of a sample, for the planner and the user's ``cost``."""

    ref: Ref
    tokens: int  # length of its arrays, in tokens; 1 for samples without


class Sample(NamedTuple):
    """A decoded sample: one-dimensional numpy arrays of the same length by name ("tokens", …),
    or without packing whatever values the user's ``decode`` made."""

    meta: Meta
    values: dict[str, Any]
