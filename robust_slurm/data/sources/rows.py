"""Rows of Arrow data as records, and the sources that have columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError
from robust_slurm.data.sources.common import FileSource
from robust_slurm.data.sources.files import INSTALL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from robust_slurm.data.sources.common import Decode, Patterns


def rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a RecordBatch as dicts: lists of numbers are numpy arrays (views)."""
    names = batch.schema.names
    for values in zip(*(_values(column) for column in batch.columns)):  # noqa: B905 - Python 3.9
        yield dict(zip(names, values))  # noqa: B905 - Python 3.9


def _values(column: Any) -> Sequence[Any]:
    import pyarrow as pa

    kind = column.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _numbers(kind.value_type):
        values = column.values
        if not values.null_count:
            flat = values.to_numpy(zero_copy_only=False)
            ends = column.offsets.to_pylist()
            valid = column.is_valid().to_pylist()
            return [
                flat[ends[row] : ends[row + 1]] if valid[row] else None
                for row in range(len(column))
            ]
    rows: Sequence[Any] = column.to_pylist()
    return rows


def _numbers(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def pyarrow(name: str) -> Any:
    """Return the module pyarrow, or raise DataError about ``name``, which needs it."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{name}: pyarrow is not installed: {INSTALL}") from None
    return pyarrow


class ColumnSource(FileSource):
    """A source of files with columns, of which some are read."""

    opens = True

    def __init__(
        self,
        files: Patterns,
        decode: Decode | None,
        columns: Sequence[str] | None,
        parallel: bool,
        storage_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(files, decode, parallel, storage_options, options)
        self._columns = ["tokens"] if columns is None and decode is None else columns


def checked_columns(name: str, wanted: Sequence[str] | None, there: Sequence[str]) -> None:
    """Raise DataError if a column is not there."""
    missing = [column for column in wanted or () if column not in there]
    if missing:
        raise DataError(
            f"{name}: no column {missing[0]!r}, but {', '.join(there)};"
            ' give columns= and decode=; without decode, "tokens" is taken'
        )
