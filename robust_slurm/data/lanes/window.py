"""A window of a lane's samples, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, overload

from robust_slurm.data.arrays import OVERHEAD, size_of, tokens_of
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Ref, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable


_new: Any = tuple.__new__  # half the time of a NamedTuple's own function


class LaneWindow(Sequence["tuple[Sample, Position]"]):
    """Samples of one part of a lane in their shuffled order, each with the position after it.

    Columns, of which objects are made when they are asked for: a process reads tens of thousands
    of small samples ahead, and Python's garbage collector would look through all their objects
    again and again. That alone took a third of the time of small samples (decision 103).
    """

    __slots__ = (
        "after", "epoch", "flat", "part", "records", "starts", "taken", "tokens", "turn", "values",
        "whose",
    )  # fmt: skip

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
        part. ``values``: a dict of each sample, or a buffer of int32: the tokens of one that has
        nothing else. These become one array, of which samples are given views. ``taken``: records
        of the part up to and with each sample, in shuffled order. ``after``: the position after
        the last sample."""
        import numpy as np

        self.whose = whose
        self.epoch, self.turn, self.part = place
        self.records = records
        own = [isinstance(each, dict) for each in values]
        if True in own:
            self.tokens = [tokens_of(v) if d else len(v) for v, d in zip(values, own)]  # noqa: B905
            buffers = [v for v, d in zip(values, own) if not d]  # noqa: B905
            self.values = [v if d else None for v, d in zip(values, own)]  # noqa: B905
            lengths = [0 if d else n for n, d in zip(self.tokens, own)]  # noqa: B905
        else:
            self.tokens = lengths = list(map(len, values))
            self.values, buffers = [None] * len(values), values
        self.flat = np.frombuffer(bytearray().join(buffers), dtype=np.int32)
        self.starts = [0, *accumulate(lengths)][:-1]
        """Of each sample in ``flat``."""
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
        (meta,) = self.metas(at, at + 1)
        turn, taken = self.turn, self.places(at, at + 1)[0]
        after = Position(self.epoch, turn, taken) if isinstance(taken, int) else taken
        return Sample(meta, self._values(at)), after

    def _values(self, at: int) -> dict[str, Any]:
        values: dict[str, Any] | None = self.values[at]
        if values is None:
            start = self.starts[at]
            return {"tokens": self.flat[start : start + self.tokens[at]]}
        return values

    def places(self, begin: int, end: int) -> list[int | Position]:
        """Return where some of the samples end: ``taken``; of the window's last one ``after``."""
        found: list[int | Position] = [*self.taken[begin:end]]
        if end == len(self.records):
            found[-1] = self.after
        return found

    def metas(self, begin: int, end: int) -> list[Meta]:
        """Return the metadata of some of the samples."""
        same = map(repeat, (*self.whose, self.epoch, self.part))
        names = zip(*same, self.records[begin:end], repeat(0))
        refs = map(_new, repeat(Ref), names)
        return list(map(_new, repeat(Meta), zip(refs, self.tokens[begin:end])))  # noqa: B905

    def give(self, begin: int, end: int) -> list[Sample]:
        """Return some of the samples, and forget their values: they belong to the taker."""
        metas, flat = self.metas(begin, end), self.flat
        columns = (self.values[begin:end], self.starts[begin:end], self.tokens[begin:end])
        values = [
            {"tokens": flat[start : start + tokens]} if found is None else found
            for found, start, tokens in zip(*columns)  # noqa: B905 - Python 3.9
        ]
        self.values[begin:end] = [None] * (end - begin)
        return list(map(_new, repeat(Sample), zip(metas, values)))  # noqa: B905

    def sizes(self) -> list[int]:
        """Return the bytes of each sample's values."""
        return [
            OVERHEAD + 4 * tokens if values is None else size_of(values)
            for values, tokens in zip(self.values, self.tokens)  # noqa: B905 - Python 3.9
        ]

    def clear(self) -> None:
        """Forget the samples: whoever has been given them may free them."""
        for column in (self.records, self.values, self.tokens, self.taken):
            column.clear()
