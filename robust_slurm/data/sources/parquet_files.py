"""Parquet: a row a record, a row group a part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from robust_slurm.data.sources.base import SourcePart
from robust_slurm.data.sources.files import Unreadable, is_url, of_the_system
from robust_slurm.data.sources.rows import ColumnSource, checked_columns, pyarrow, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from robust_slurm.data.sources.common import Decode, Patterns
    from robust_slurm.data.sources.files import SourceFile

BATCH = 64  # rows that are Python objects at a time
WHOLE = 2 << 20  # bytes of a row group that is read at once: reading it by pages takes 3 times that
BUFFER = 1 << 18  # bytes of a column that are read at a time


def parquet(
    files: Patterns,
    decode: Decode | None = None,
    *,
    columns: Sequence[str] | None = None,
    parallel: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ParquetFiles:
    """Return a source of Parquet files. ``files``: paths, patterns or fsspec URLs.

    ``decode`` is given a row as a dict, in which lists of numbers are numpy arrays. ``columns``:
    those that are read, by default all, and without ``decode`` "tokens" alone. To go on within a
    row group, the columns before are decompressed. Raises DataError.
    """
    return ParquetFiles(files, decode, columns, parallel, storage_options, options)


class ParquetFiles(ColumnSource):
    """A source of Parquet files."""

    def _divided(self, file: SourceFile) -> list[tuple[SourcePart, SourceFile, int]]:
        with self._opened(file) as opened:
            checked_columns(file.name, self._columns, opened.schema_arrow.names)
            groups = [opened.metadata.row_group(n) for n in range(opened.num_row_groups)]
        return [
            (SourcePart(f"{file.name}#{n}", group.total_byte_size, group.num_rows), file, n)
            for n, group in enumerate(groups)
        ]

    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, Any]]:
        with self._opened(file) as opened:
            small = opened.metadata.row_group(number).total_byte_size <= WHOLE
            if small:
                table = opened.read_row_group(number, columns=self._columns, use_threads=False)
            else:
                batches = opened.iter_batches(
                    BATCH, row_groups=[number], columns=self._columns, use_threads=False
                )
                yield from _from(batches, start)
        del opened  # it holds the compressed column
        if small:
            yield from _from(table.to_batches(max_chunksize=BATCH), start)

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[Any]:
        pa = pyarrow(file.name)
        import pyarrow.parquet as pq

        with self.files.open(file) as stored:
            try:
                source = stored if is_url(file.name) else file.name
                with pq.ParquetFile(source, buffer_size=BUFFER) as opened:
                    yield opened
            except pa.ArrowException as error:
                raise Unreadable(str(error)) from error
            except OSError as error:
                if of_the_system(error):
                    raise
                raise Unreadable(str(error)) from error


def _from(batches: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """Yield the records of consecutive batches from record ``start`` on."""
    index = 0
    for batch in batches:
        skipped = min(max(0, start - index), len(batch))
        yield from enumerate(rows(batch.slice(skipped)), index + skipped)
        index += len(batch)
