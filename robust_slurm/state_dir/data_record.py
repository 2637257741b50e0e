"""The data side of a job, read from its roster without trust (``srun_wrapper/job/data.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from robust_slurm.state_dir.plain import clean, number, whole

MOST = 100  # rows of a table


@dataclass(frozen=True)
class DataSource:
    """A source of data; "" stands for all those without a row."""

    name: str
    tokens_s: float
    samples_s: float
    waited_s: float  # of the last minute, that a data process waited for it
    silent_s: float  # since when a data process waits for it; 0: none does
    read: int  # records that the data processes have read since they began
    skipped: int  # bad ones of them


@dataclass(frozen=True)
class RankWait:
    """A rank's wait for data."""

    rank: int | None  # None: known by its node and local rank alone (torchrun)
    local: int
    node: str
    seconds: float


@dataclass(frozen=True)
class DataRecord:
    """Waits of ranks within a window of about the last minute, and what the data processes do."""

    nodes: int  # whose ranks have asked for a data process
    processes: int  # that run
    off_nodes: int  # on which it is not started any more
    off: tuple[str, ...]  # node: why
    deaths: int
    ahead_least: int | None  # steps ahead on the node that has fewest
    ahead: float | None  # on average
    most_ahead: int | None
    held_bytes: int | None  # of the node that holds most
    memory_bytes: int | None
    window_s: float
    ranks: int
    waiting_ranks: int  # now
    waiting_s: float  # the longest of them
    waited_ranks: int  # that waited at least 1 s of the window
    waited_s: float  # on average over all ranks
    most_waited: tuple[RankWait, ...]
    sources: tuple[DataSource, ...]  # those that are waited for first
    other_sources: int


def data_from(data: object) -> DataRecord | None:
    """The data side of a roster, or None if it has none."""
    if not isinstance(data, dict):
        return None
    off = data.get("off")
    return DataRecord(
        nodes=_count(data.get("nodes")),
        processes=_count(data.get("processes")),
        off_nodes=_count(data.get("off_nodes")),
        off=tuple(clean(text) for text in off[:MOST]) if isinstance(off, list) else (),
        deaths=_count(data.get("deaths")),
        ahead_least=whole(data.get("ahead_least")),
        ahead=number(data.get("ahead")),
        most_ahead=whole(data.get("most_ahead")),
        held_bytes=whole(data.get("held_bytes")),
        memory_bytes=whole(data.get("memory_bytes")),
        window_s=_amount(data.get("window_s")),
        ranks=_count(data.get("ranks")),
        waiting_ranks=_count(data.get("waiting_ranks")),
        waiting_s=_amount(data.get("waiting_s")),
        waited_ranks=_count(data.get("waited_ranks")),
        waited_s=_amount(data.get("waited_s")),
        most_waited=tuple(
            RankWait(
                whole(row.get("rank")),
                _count(row.get("local")),
                clean(row.get("node"), 255),
                _amount(row.get("seconds")),
            )
            for row in _rows(data.get("most_waited"))
        ),
        sources=tuple(
            DataSource(
                clean(row.get("name"), 100),
                _amount(row.get("tokens_s")),
                _amount(row.get("samples_s")),
                _amount(row.get("waited_s")),
                _amount(row.get("silent_s")),
                _count(row.get("read")),
                _count(row.get("skipped")),
            )
            for row in _rows(data.get("sources"))
        ),
        other_sources=_count(data.get("other_sources")),
    )


def _rows(value: object) -> Iterator[dict[str, Any]]:
    for row in value[:MOST] if isinstance(value, list) else ():
        if isinstance(row, dict):
            yield row


def _count(value: object) -> int:
    return max(0, whole(value) or 0)


def _amount(value: object) -> float:
    return max(0.0, number(value) or 0.0)
