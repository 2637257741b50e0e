"""Records that are in memory, or that another library reads: lists, and datasets."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from robust_slurm.data.arrays import as_array, token_ids
from robust_slurm.data.errors import DataError
from robust_slurm.data.sources import turn
from robust_slurm.data.sources.base import SourcePart
from robust_slurm.data.sources.common import FileSource
from robust_slurm.data.sources.files import SourceFile, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from robust_slurm.data.sources.common import Decode

ROWS = 1 << 16  # records of a part of a list
KNOWN = 10_000  # records that are all looked at to know a list again
SOME = 1000  # those of a longer one
FIRST = 8  # records that two passes have to begin with
SERVERS = ("aiohttp", "botocore", "httpcore", "httpx", "huggingface_hub", "requests")
"""Packages whose exceptions say that a server does not answer."""
DIVISIBLE = (
    "ArrowExamplesIterable", "ExamplesIterable", "FilteredExamplesIterable",
    "FormattedExamplesIterable", "MappedExamplesIterable", "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable", "TypedExamplesIterable",
)  # fmt: skip
"""Steps of a streaming dataset that give the same records when it is read shard by shard."""


def records(
    dataset: Any, decode: Decode | None = None, *, parallel: bool = False, **options: Any
) -> FileSource:
    """Return a source of a list, or of a dataset with ``len()`` and numbered records; or of what
    gives the same records at each pass: a streaming dataset of Hugging Face, whose shards are its
    parts, or any other object that can be iterated again and again.

    A Plan takes a list or such a dataset as it is, too. A record without ``decode`` is a dict with
    "tokens", or the tokens. Give a dataset that is neither shuffled nor divided among ranks: the
    plan does both. To go on within a shard, the records before are read. Raises DataError.
    """
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return ListedRecords(dataset, decode, parallel, options)
    return StreamedRecords(dataset, decode, parallel, options)


class _Records(FileSource):
    """A source without files."""

    def __init__(
        self, dataset: Any, decode: Decode | None, parallel: bool, options: dict[str, Any]
    ) -> None:
        super().__init__([], decode, parallel, None, options)
        self._dataset = dataset
        self._name = type(dataset).__name__

    def _tokens(self, record: Any) -> dict[str, Any]:
        return super()._tokens(record) if hasattr(record, "keys") else {"tokens": token_ids(record)}


class ListedRecords(_Records):
    """A source of numbered records."""

    def fingerprint(self) -> str:
        count = len(self._dataset)
        step = 1 if count <= KNOWN else -(-count // SOME)
        digest = hashlib.sha256(f"{count}".encode())
        for at in range(0, count, step):
            try:
                digest.update(_described(self._dataset[at]))
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - a bad record, of which read() tells
                digest.update(type(error).__name__.encode())
        return digest.hexdigest()[:32]

    def _found(self) -> tuple[list[SourcePart], list[tuple[SourceFile, int]]]:
        count = len(self._dataset)
        sizes = [min(ROWS, count - first) for first in range(0, count, ROWS)]
        parts = [SourcePart(f"{self._name}#{n}", size, size) for n, size in enumerate(sizes)]
        return parts, [(SourceFile(part.name, 0), n) for n, part in enumerate(parts)]

    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, int]]:
        size = min(ROWS, len(self._dataset) - number * ROWS)
        yield from ((index, number * ROWS + index) for index in range(start, size))

    def _parsed(self, raw: int) -> Any:
        record = self._dataset[raw]
        return dict(record) if type(record) is dict else record  # decode may take out of it


class StreamedRecords(_Records):
    """A source of what can be iterated."""

    def __init__(
        self, dataset: Any, decode: Decode | None, parallel: bool, options: dict[str, Any]
    ) -> None:
        super().__init__(dataset, decode, parallel, options)
        unordered = isinstance(dataset, (set, frozenset))  # of text: another order in each process
        if unordered or not hasattr(dataset, "__iter__") or iter_is_used_up(dataset):
            raise DataError(
                f"a source of records is {self._name}: give a list, or a dataset that can be read "
                "again from its beginning"
            )
        if hasattr(dataset, "batch_sampler") and hasattr(dataset, "dataset"):
            raise DataError(f"a source of records is a {self._name}: give its dataset")
        steps = _steps_of(dataset)
        made_of = [type(step).__name__ for step in steps]
        if getattr(dataset, "_shuffling", None) or any("Shuffl" in name for name in made_of):
            raise DataError(f"{self._name} is shuffled: give it unshuffled, as the plan shuffles")
        if any(map(_unseeded, steps)):
            raise DataError(
                f"{self._name} draws at random without a seed, others in every process: pass seed= "
                "to interleave_datasets(), or give the datasets as sources of their own"
            )
        if getattr(dataset, "_distributed", None):
            raise DataError(f"{self._name} is divided among ranks: give it whole, the plan divides")
        divisible = bool(made_of) and all(name in DIVISIBLE for name in made_of)
        self._shards = int(dataset.num_shards) if divisible else 1
        self._divides = bool(made_of)

    def fingerprint(self) -> str:
        """Return a digest of the shards' names, if it has some, and of its first record. Raises
        DataError if another pass begins with other records."""
        digest = hashlib.sha256(f"{self._shards} {_names_of(self._dataset)}".encode())
        if not self._divides and self._first(FIRST) != self._first(FIRST):
            raise DataError(
                f"{self._name} gives other records at each pass, so a restart could not go on: "
                "give it unshuffled, as the plan shuffles"
            )
        digest.update(b"".join(self._first(1)))
        return digest.hexdigest()[:32]

    def _first(self, count: int) -> list[bytes]:
        """Return what describes the first records."""
        try:
            return [_described(each) for each in islice(self._iterated(0), count)] or [b"null"]
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a bad record, of which read() tells
            return [type(error).__name__.encode()]

    def _found(self) -> tuple[list[SourcePart], list[tuple[SourceFile, int]]]:
        parts = [SourcePart(f"{self._name}#{n}", 1) for n in range(self._shards)]
        return parts, [(SourceFile(part.name, 0), n) for n, part in enumerate(parts)]

    def _iterated(self, number: int) -> Iterator[Any]:
        """Iterate over a shard. One of Hugging Face is made anew for it, also of a dataset that has
        one alone: two threads that iterate over the same object skip records."""
        if self._divides:
            return iter(self._dataset.shard(self._shards, number))
        return iter(self._dataset)

    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, Any]]:
        given, index = self._iterated(number), 0
        while True:
            if not self._parallel:  # it may tokenize
                turn.begin(f"{file.name}: record {index}")
            try:
                record = next(given)
            except StopIteration:
                return
            except (DataError, ImportError, MemoryError, OSError):
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if type(error).__module__.partition(".")[0] in SERVERS:
                    raise ConnectionError(why) from error
                raise Unreadable(why) from error
            finally:
                if not self._parallel:
                    turn.end()
            if index >= start:
                yield index, record
            index += 1


def iter_is_used_up(dataset: Any) -> bool:
    """True for an iterator: there is no second pass over it."""
    return hasattr(dataset, "__next__")


def _steps_of(dataset: Any) -> list[Any]:
    """Return the steps that a streaming dataset of Hugging Face is made of, and those of all
    datasets that it interleaves or joins."""
    waiting, steps = [getattr(dataset, "_ex_iterable", None)], []
    while waiting:
        step = waiting.pop()
        if step is not None:
            steps.append(step)
            waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", [])]
    return steps


def _unseeded(step: Any) -> bool:
    """True if a step draws by a generator that numpy has seeded by the system: with 128 bits."""
    bits = getattr(getattr(step, "generator", None), "bit_generator", None)
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", 0)
    return type(entropy) is int and entropy >= 1 << 64


def _names_of(dataset: Any) -> list[str]:
    """Return the names of the files that a streaming dataset of Hugging Face reads."""
    step: Any = getattr(dataset, "_ex_iterable", None)
    while hasattr(step, "ex_iterable"):
        step = step.ex_iterable
    files = (getattr(step, "kwargs", None) or {}).get("base_files")
    return [str(file).rpartition("/")[2] for file in files] if isinstance(files, list) else []


def _described(record: Any) -> bytes:
    """Return bytes that are the same for the same record in every process."""
    try:
        return json.dumps(record, sort_keys=True).encode()
    except (TypeError, ValueError):
        pass
    if isinstance(record, (bytes, bytearray)):
        return bytes(record)
    if isinstance(record, dict):
        parts = [part for name in record for part in (str(name).encode(), _described(record[name]))]
    elif isinstance(record, (list, tuple)):
        parts = [_described(each) for each in record]
    else:
        try:
            array: Any = as_array(record)
            if array.dtype.hasobject:  # its bytes are addresses
                return _described(array.tolist())
            return f"{array.dtype} {array.shape}".encode() + bytes(array.tobytes())
        except (AttributeError, TypeError):  # no array; bfloat16
            return str(getattr(record, "tolist", lambda: type(record).__name__)()).encode()
    return b"(" + b",".join(parts) + b")"
