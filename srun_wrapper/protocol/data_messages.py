"""Figures of a node's data process, in its reports to the supervisor.

The process runs the user's code and writes them (``data/service/figures.py``): figures that are not
of these types and sizes are ignored as a whole. A report holds them as bytes, so that neither these
nor the figures of a newer version cost the node its connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

SOURCES = 21  # rows: the sources that count, and the sum of all others
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Amount = Annotated[float, Meta(ge=0.0, le=1e15)]


class SourceFigures(msgspec.Struct, array_like=True, frozen=True):
    """One source, as the steps made on a node use it; "" for the sum of several others."""

    name: Annotated[str, Meta(max_length=100)]
    tokens_s: _Amount
    samples_s: _Amount
    waited_s: _Amount  # s of the last minute in which the making of steps waited for it
    silent_s: _Amount  # s for which it has given nothing to steps that wait for it; 0: none does
    read: _Count  # records that this node has read
    bad: _Count  # of them, left out


class DataFigures(msgspec.Struct, array_like=True, frozen=True):
    """Steps that a data process holds, and the sources of its steps."""

    ahead: _Count  # steps that are made before ranks ask for them
    most_ahead: _Count
    held: _Count  # bytes
    memory: _Count
    all_here: bool  # it reads all lanes, as every node of the job does
    sources: Annotated[tuple[SourceFigures, ...], Meta(max_length=SOURCES)] = ()
    others: _Count = 0  # sources without a row of their own


class DataReport(msgspec.Struct, array_like=True, frozen=True):
    """A node's data process, as robust-task knows it."""

    deaths: _Count = 0  # of the node's data processes so far
    off: Annotated[str, Meta(max_length=300)] = ""  # why it is not started any more
    figures: DataFigures | None = None  # None: it does not run, or says nothing


MOST = 1 << 14  # bytes of a DataReport
decode_figures = msgspec.json.Decoder(DataFigures).decode
encode_report = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DataReport).decode


def report_from(data: bytes) -> DataReport | None:
    """Return the report in these bytes, or None."""
    try:
        return _decode(data) if 0 < len(data) <= MOST else None
    except (ValueError, RecursionError):
        return None
