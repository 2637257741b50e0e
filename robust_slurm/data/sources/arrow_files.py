"""Arrow IPC files, as Hugging Face datasets are saved on disk: a row a record."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError
from robust_slurm.data.sources.base import SourcePart
from robust_slurm.data.sources.files import Unreadable, expanded, is_url, of_the_system
from robust_slurm.data.sources.rows import ColumnSource, checked_columns, pyarrow, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from robust_slurm.data.sources.common import Decode, Patterns
    from robust_slurm.data.sources.files import SourceFile

ROWS = 1 << 16  # rows of a part: a dataset often has few files, and lanes need several parts


def arrow(
    files: Patterns,
    decode: Decode | None = None,
    *,
    columns: Sequence[str] | None = None,
    parallel: bool = False,
    **options: Any,
) -> ArrowFiles:
    """Return a source of datasets that ``Dataset.save_to_disk`` saved, or of Arrow files.

    ``files``: folders of datasets, or paths or patterns of .arrow files (streams or files of
    Arrow IPC), of a local file system: they are mapped into memory. ``decode`` is given a row as
    a dict, in which lists of numbers are numpy arrays. ``columns``: as for ``parquet``. To go on
    within a part costs nothing. Raises DataError.
    """
    made = ArrowFiles(files, decode, columns, parallel, None, options)
    for pattern in made.files.patterns:
        if is_url(pattern):
            raise DataError(f"{pattern}: arrow() maps files into memory; give local ones")
    return made


class ArrowFiles(ColumnSource):
    """A source of Arrow files."""

    def _files(self) -> list[SourceFile]:
        paths = [Path(name) for pattern in self.files.patterns for name in expanded(pattern)]
        names = [str(file) for path in paths for file in _of_dataset(path)]
        return type(self.files)(names, {}).find() if names else self.files.find()

    def _divided(self, file: SourceFile) -> list[tuple[SourcePart, SourceFile, int]]:
        with self._opened(file) as table:
            checked_columns(file.name, self._columns, table.schema.names)
            count = table.num_rows
        parts = []
        for number, first in enumerate(range(0, count, ROWS)):
            size = min(ROWS, count - first)
            part = SourcePart(f"{file.name}#{number}", file.size * size // count, size)
            parts.append((part, file, number))
        return parts

    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, Any]]:
        with self._opened(file) as table:
            if self._columns is not None:
                table = table.select(self._columns)
            part = table.slice(number * ROWS + start, max(0, ROWS - start))
            for batch in part.to_batches(max_chunksize=512):
                yield from enumerate(rows(batch), start)
                start += len(batch)

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[Any]:
        pa = pyarrow(file.name)
        with self.files.open(file) as stored:
            magic = stored.read(6)
        try:
            with pa.memory_map(file.name) as mapped:
                reader = pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream
                yield reader(mapped).read_all()
        except pa.ArrowException as error:
            raise Unreadable(str(error)) from error
        except OSError as error:
            if of_the_system(error):
                raise
            raise Unreadable(str(error)) from error


def _of_dataset(path: Path) -> list[Path]:
    """Return the files of a saved dataset; those that are no folder as they are."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        raise DataError(f"{path}: datasets {', '.join(splits)}; give the folder of one: {path}/…")
    try:
        state = json.loads((path / "state.json").read_bytes())
        return [path / each["filename"] for each in state["_data_files"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no dataset that save_to_disk() saved: {error}") from error
