"""Packing in arrival order, as most trainings do it, and what a row costs the model."""

from __future__ import annotations

from typing import Any

PACK = 4096  # tokens of a row


class Packer:
    """Fills rows with documents as they come; a document that does not fit begins the next row.

    ``pending``: the pieces of the row that is being filled, all of the state.
    """

    def __init__(self, pack: int = PACK, pending: list[Any] | None = None) -> None:
        self.pack = pack
        self.pending = list(pending or [])
        self._used = sum(len(piece) for piece in self.pending)

    def add(self, tokens: Any) -> list[list[Any]]:
        """Add a document, in pieces if it is longer than a row. Returns the rows that got full."""
        rows = []
        for begin in range(0, len(tokens), self.pack):
            piece = tokens[begin : begin + self.pack]
            if self._used + len(piece) > self.pack:
                rows.append(self.pending)
                self.pending, self._used = [], 0
            self.pending.append(piece)
            self._used += len(piece)
        return rows


def padded(pieces: list[Any], pack: int = PACK) -> dict[str, Any]:
    """Return a row's arrays: its tokens, and the number of the document (from 1) of each."""
    import numpy

    tokens = numpy.zeros(pack, dtype=numpy.int32)
    segments = numpy.zeros(pack, dtype=numpy.int32)
    lengths = [len(piece) for piece in pieces]
    tokens[: sum(lengths)] = numpy.concatenate(pieces)
    segments[: sum(lengths)] = numpy.repeat(numpy.arange(1, len(pieces) + 1), lengths)
    return {"tokens": tokens, "segments": segments}


def cost(lengths: list[int]) -> int:
    """Return what a row costs by the model of this benchmark: attention within its documents."""
    return sum(length**2 for length in lengths)


def arrival_rows(lengths: list[int], pack: int = PACK) -> list[list[int]]:
    """Return the lengths in each row that packing in arrival order gives, without any tokens."""
    packer = Packer(pack)
    return [[len(piece) for piece in row] for n in lengths for row in packer.add(range(n))]


def imbalance(costs: list[float]) -> float:
    """Return max/mean of what the ranks (or the rows) of a step cost; 1 is best."""
    return max(costs) * len(costs) / sum(costs)
