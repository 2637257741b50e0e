"""Rows of Arrow data as records, and the sources that have columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError
from robust_slurm.data.sources.common import FileSource
from robust_slurm.data.sources.files import INSTALL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from robust_slurm.data.sources.common import Decode, Patterns


class Unfit:
    """The place of a value that Python has none for: text that is no UTF-8, a date beyond 9999."""

    def __init__(self, why: Exception) -> None:
        self.why = why


def rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a RecordBatch as dicts: lists of numbers are numpy arrays (views), and a
    value that cannot be had is ``Unfit``."""
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
    try:
        rows: Sequence[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        return [_value(column, row) for row in range(len(column))]
    return rows


def _value(column: Any, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        return Unfit(error)


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

    def _at_once(self, raw: dict[str, Any]) -> Any:
        tokens = raw.get("tokens") if len(raw) == 1 else None  # others may be unfit
        dtype = getattr(tokens, "dtype", None)
        return tokens if dtype is not None and dtype.char == "i" else None

    def _parsed(self, raw: dict[str, Any]) -> dict[str, Any]:
        for name, value in raw.items():
            if type(value) is Unfit:
                raise ValueError(f"column {name}: {value.why}")
        return raw


def checked_columns(name: str, wanted: Sequence[str] | None, there: Sequence[str]) -> None:
    """Raise DataError if a column is not there."""
    missing = [column for column in wanted or () if column not in there]
    if missing:
        raise DataError(
            f"{name}: no column {missing[0]!r}, but {', '.join(there)};"
            ' give columns= and decode=; without decode, "tokens" is taken'
        )
