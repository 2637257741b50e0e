"""A source of records in memory, whose reads can be made to fail or to hang."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from robust_slurm.data.sources.base import BadRecord, SourceOptions, SourcePart

Record = int | BadRecord | None  # an int n: a sample of one token, n


class ListedSource:
    """Parts as lists of records. ``before(part, record)`` is called before each is given."""

    def __init__(self, parts: Sequence[Sequence[Record]], **options: Any) -> None:
        self.records = parts
        self.options = SourceOptions(**options)
        self.reads: list[tuple[int, int]] = []  # (part, start) of each
        self.before: Callable[[int, int], object] = lambda part, record: None

    def parts(self) -> list[SourcePart]:
        return [SourcePart(f"part{n}", len(part)) for n, part in enumerate(self.records)]

    def read(
        self, part: int, start: int = 0
    ) -> Iterator[tuple[int, dict[str, Any] | BadRecord | None]]:
        self.reads.append((part, start))
        for index, record in enumerate(self.records[part][start:], start):
            self.before(part, index)
            if isinstance(record, int):
                yield index, {"tokens": np.array([record], np.int32)}
            else:
                yield index, record

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.parts()).encode()).hexdigest()


def numbered(sizes: Sequence[int], **options: Any) -> ListedSource:
    """Return a source whose parts have so many samples, each with a token of its own."""
    return ListedSource(
        [range(1000 * n, 1000 * n + size) for n, size in enumerate(sizes)], **options
    )


class Gate:
    """A ``before`` that hangs at one record until it is opened."""

    def __init__(self, part: int, record: int) -> None:
        self.at = (part, record)
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, part: int, record: int) -> None:
        if (part, record) == self.at:
            self.reached.set()
            assert self.opened.wait(60)
