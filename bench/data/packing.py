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
    """Return a row's arrays: tokens, and of each its position in the document and the document's
    number in the row, -1 in padding."""
    import numpy

    tokens = numpy.zeros(pack, dtype=numpy.int32)
    positions = numpy.zeros(pack, dtype=numpy.int32)
    documents = numpy.full(pack, -1, dtype=numpy.int32)
    end = 0
    for number, piece in enumerate(pieces):
        begin, end = end, end + len(piece)
        tokens[begin:end] = piece
        positions[begin:end] = numpy.arange(len(piece), dtype=numpy.int32)
        documents[begin:end] = number
    return {"tokens": tokens, "position_ids": positions, "document_ids": documents}


def arrival_rows(lengths: list[int], pack: int = PACK) -> list[list[int]]:
    """Return the lengths in each row that packing in arrival order gives, without any tokens."""
    packer = Packer(pack)
    return [[len(piece) for piece in row] for n in lengths for row in packer.add(range(n))]
