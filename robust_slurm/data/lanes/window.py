"""A window of a lane's samples, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from robust_slurm.data.arrays import size_of, tokens_of
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Ref, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable


class LaneWindow(Sequence["tuple[Sample, Position]"]):
    """Samples of one part of a lane in their shuffled order, each with the position after it.

    Columns, of which objects are made when they are asked for: a process reads tens of thousands
    of small samples ahead, and Python's garbage collector would look through all their objects
    again and again. That alone took a third of the time of small samples (decision 103).
    """

    __slots__ = ("after", "epoch", "part", "records", "taken", "tokens", "turn", "values", "whose")

    def __init__(
        self,
        whose: tuple[str, int],
        place: tuple[int, int, int],
        records: list[int],
        values: list[Any],
        taken: list[int],
        after: Position,
    ) -> None:
        """``whose``: source and lane. ``place``: pass, turn and part. ``records``: indices in the
        part. ``values``: of each sample; an ``array`` is the tokens of one that has nothing else.
        ``taken``: records of the part up to and with each sample, in shuffled order. ``after``:
        the position after the last sample."""
        self.whose = whose
        self.epoch, self.turn, self.part = place
        self.records = records
        self.tokens = [tokens_of(each) for each in values]
        self.values = values
        self.taken = taken
        self.after = after

    @classmethod
    def of(cls, samples: Sequence[Sample], after: Sequence[Iterable[int]]) -> LaneWindow:
        """Return a window of samples that another process has read."""
        ref = samples[0].meta.ref
        places = [Position(*each) for each in after]
        return cls(
            (ref.source, ref.lane),
            (ref.epoch, places[0].turn, ref.part),
            [sample.meta.ref.record for sample in samples],
            [sample.values for sample in samples],
            [place.taken for place in places],
            places[-1],
        )

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, at: int) -> tuple[Sample, Position]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[Sample, Position]]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        ((meta, position),) = self.metas(at, at + 1)
        return Sample(meta, self.values[at]), position

    def metas(self, begin: int, end: int) -> list[tuple[Meta, Position]]:
        """Return the metadata of some of the samples, each with the position after it."""
        (source, lane), epoch, turn, part = self.whose, self.epoch, self.turn, self.part
        columns = (self.records[begin:end], self.tokens[begin:end], self.taken[begin:end])
        made = [
            (Meta(Ref(source, lane, epoch, part, record), tokens), Position(epoch, turn, taken))
            for record, tokens, taken in zip(*columns)  # noqa: B905 - Python 3.9
        ]
        if end == len(self.records):
            made[-1] = (made[-1][0], self.after)
        return made

    def give(self, begin: int, end: int) -> tuple[list[tuple[Meta, Position]], list[Sample]]:
        """Return some of the samples, and forget their values: they belong to the taker."""
        metas, values = self.metas(begin, end), self.values[begin:end]
        self.values[begin:end] = [None] * (end - begin)
        return metas, [Sample(meta, each) for (meta, _), each in zip(metas, values)]  # noqa: B905

    def sizes(self) -> list[int]:
        """Return the bytes of each sample's values."""
        return [size_of(each) for each in self.values]

    def clear(self) -> None:
        """Forget the samples: whoever has been given them may free them."""
        for column in (self.records, self.values, self.tokens, self.taken):
            column.clear()
