"""JSON Lines: a record a line, a file a part; plain, .gz or .zst."""

from __future__ import annotations

import json
from array import array
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from robust_slurm.data.sources.common import FileSource
from robust_slurm.data.sources.files import Unreadable, broken, decompressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from robust_slurm.data.sources.common import Decode, Patterns
    from robust_slurm.data.sources.files import SourceFile


def jsonl(
    files: Patterns,
    decode: Decode | None = None,
    *,
    parallel: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> JsonLines:
    """Return a source of JSON Lines. ``files``: paths, patterns or fsspec URLs.

    Records are numbered by line; empty lines are left out. To go on within a file, the lines
    before are read (and decompressed), but neither parsed nor decoded. Raises DataError.
    """
    return JsonLines(files, decode, parallel, storage_options, options)


class JsonLines(FileSource):
    """A source of JSON Lines."""

    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, bytes]]:
        damaged = broken()
        with self.files.open(file) as stored:
            try:
                yield from enumerate(islice(decompressed(stored, file.name), start, None), start)
            except damaged as error:
                raise Unreadable(str(error)) from error

    def _at_once(self, raw: bytes) -> array[int] | None:
        try:
            return array("i", _quick()[0](raw)["tokens"])
        except Exception:  # noqa: BLE001 - _parsed or _tokens raises it again
            return None

    def _parsed(self, raw: bytes) -> Any:
        return None if raw.isspace() else _loads(raw)


def _loads(raw: bytes) -> Any:
    decode, errors = _quick()
    try:
        return decode(raw)
    except errors:
        return json.loads(raw)


@cache
def _quick() -> tuple[Callable[[bytes], Any], type[Exception]]:
    """Return msgspec's parser where it is installed: twice as fast, and the same values.

    What it does not take (NaN, half a surrogate) the standard library may.
    """
    try:
        import msgspec
    except ImportError:
        return json.loads, ValueError
    return msgspec.json.decode, msgspec.MsgspecError
