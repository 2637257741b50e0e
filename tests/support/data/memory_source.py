"""A corpus in memory, and feeds of it: what the planner and the engine need of data."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes.order import lanes_of, parts_of_lane
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.plan import Plan
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.data.sources.base import BadRecord, SourceOptions, SourcePart


class MemorySource:
    """Documents of given lengths; token i of document n of part p is a number made of all three."""

    def __init__(self, name: str, lengths: Iterable[Iterable[int]], lanes: int = 2) -> None:
        self.name = name
        self.lengths = [list(part) for part in lengths]
        self.options = SourceOptions(lanes=lanes, window=1)

    def parts(self) -> list[SourcePart]:
        return [SourcePart(f"{self.name}{n}", len(part)) for n, part in enumerate(self.lengths)]

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        for record in range(start, len(self.lengths[part])):
            yield record, self.values(part, record)

    def values(self, part: int, record: int) -> dict[str, Any]:
        first = part * 1_000_003 + record * 1_009
        return {"tokens": np.arange(first, first + self.lengths[part][record], dtype=np.int32)}

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.name, self.lengths)).encode()).hexdigest()[:16]


def corpus(
    name: str, seed: int, parts: int = 4, each: int = 50, mean: float = 5.0, sigma: float = 0.8,
    most: int = 4096, lanes: int = 2,
) -> MemorySource:  # fmt: skip
    """Return documents of lognormal lengths."""
    draw = random.Random(seed)
    lengths = [
        [max(1, min(most, int(draw.lognormvariate(mean, sigma)))) for _ in range(each)]
        for _ in range(parts)
    ]
    return MemorySource(name, lengths, lanes)


class MemoryFeed:
    """A lane of a MemorySource. It raises when it is asked for what it must not know any more."""

    def __init__(self, plan: Plan, name: str, lane: int) -> None:
        source = plan.sources[name]
        assert isinstance(source, MemorySource)
        self.source, self.name, self.lane, self.seed = source, name, lane, plan.seed
        self.sizes = [part.size for part in source.parts()]
        self.lanes = lanes_of(source.options.lanes, len(self.sizes))
        self.held: set[Ref] = set()
        self.at = Position()
        self.closed = False

    def seek(self, position: Position) -> None:
        self.at = position
        self.held.clear()

    def next(self) -> tuple[Meta, Position]:
        epoch, turn, taken = self.at
        while True:
            mine = parts_of_lane(self.sizes, self.seed, self.name, epoch, self.lane, self.lanes)
            if turn >= len(mine):
                epoch, turn, taken = epoch + 1, 0, 0
            elif taken >= self.sizes[mine[turn]]:
                turn, taken = turn + 1, 0
            else:
                break
        ref = Ref(self.name, self.lane, epoch, mine[turn], taken)
        self.at = Position(epoch, turn, taken + 1)
        self.held.add(ref)
        return Meta(ref, self.source.lengths[ref.part][ref.record]), self.at

    def take(self, refs: Iterable[Ref]) -> list[Sample]:
        refs = list(refs)
        self.drop(refs)
        return self.again(refs)

    def drop(self, refs: Iterable[Ref]) -> None:
        for ref in refs:
            self.held.remove(ref)

    def again(self, refs: Iterable[Ref]) -> list[Sample]:
        made = []
        for ref in refs:
            if ref.piece:
                raise DataError("feeds know whole samples only")
            values = self.source.values(ref.part, ref.record)
            made.append(Sample(Meta(ref, len(values["tokens"])), values))
        return made

    def close(self) -> None:
        self.closed = True


def memory_feeds(plan: Plan) -> dict[tuple[str, int], MemoryFeed]:
    """Return feeds of all lanes of a plan of MemorySources."""
    return {
        (name, lane): MemoryFeed(plan, name, lane)
        for name, number in plan.lanes().items()
        for lane in range(number)
    }
