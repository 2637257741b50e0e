"""The common half of all formats: options, parts, fingerprint, and the user's decode."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from robust_slurm.data.arrays import as_arrays, token_ids
from robust_slurm.data.errors import DataError
from robust_slurm.data.sources import turn
from robust_slurm.data.sources.base import BadRecord, SourceOptions, SourcePart
from robust_slurm.data.sources.files import Files, SourceFile, Unreadable, of_the_system
from robust_slurm.text import counted, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    Decode = Callable[[Any], Mapping[str, Any] | None]

OPENING = 16
"""Files that are looked into at the same time."""


class FileSource(ABC):
    """A source of files (``sources/base.py``). Threads may use it at the same time.

    ``decode``: a function of a record that returns a dict of arrays, or None to leave it out.
    Without it, a record's "tokens" are taken. A process calls one decode at a time, of all its
    sources, unless ``parallel`` says that this one may be called by several threads. What decode
    computes in Python takes one core of the process; numpy, pyarrow and zstandard use more.
    """

    def __init__(
        self,
        files: Patterns,
        decode: Decode | None,
        parallel: bool,
        storage_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.options = checked(options)
        self.files = Files(files, storage_options or {})
        self._decode = decode
        self._parallel = parallel
        self._parts: list[SourcePart] = []
        self._places: list[tuple[SourceFile, int]] = []
        self._finding = threading.Lock()
        self.listed = 0
        """Changes with each file that has been looked at."""

    def parts(self) -> list[SourcePart]:
        """Return all parts in the order of the files' names. Finds the files at the first call."""
        return self._found()[0]

    def read(
        self, part: int, start: int = 0
    ) -> Iterator[tuple[int, dict[str, Any] | BadRecord | None]]:
        """Yield (index, decoded record) from record ``start`` of the part on."""
        for index, found in self.read_quickly(part, start):
            simple = found is None or isinstance(found, (dict, BadRecord))
            yield index, found if simple else {"tokens": token_ids(found)}

    def read_quickly(self, part: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield what ``read`` does; a sample that is nothing but tokens as a buffer of int32, which
        is good until the next window of records is read."""
        parts, places = self._found()
        found, (file, number) = parts[part], places[part]
        at = start
        quick = self._decode is None
        try:
            for index, raw in self._records(file, number, start):
                tokens = self._at_once(raw) if quick else None
                if tokens is not None and len(tokens):
                    yield index, tokens
                else:
                    yield index, self._sample(found.name, index, raw)
                at = index + 1
        except Unreadable as error:
            why = f"the file cannot be read from here on: {error}"
            yield at, BadRecord(found.name, at, why, True)

    def fingerprint(self) -> str:
        """Return a digest of the parts' names, relative to their common folder, sizes, and samples
        of their content. Their times are not in it: a copy has others."""
        parts, places = self._found()
        folder = len(os.path.commonprefix([part.name for part in parts]).rpartition("/")[0])
        described = [
            [part.name[folder:], part.size, part.records, file.samples]
            for part, (file, _) in zip(parts, places)  # noqa: B905 - Python 3.9
        ]
        text = json.dumps(described)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _divided(self, file: SourceFile) -> list[tuple[SourcePart, SourceFile, int]]:
        """Return the parts of a file, and each one's number in it: by default it is one part.
        Raises DataError, OSError."""
        return [(SourcePart(file.name, file.size), file, 0)]

    @abstractmethod
    def _records(self, file: SourceFile, number: int, start: int) -> Iterator[tuple[int, Any]]:
        """Yield (index, record as stored). Raises DataError, OSError, Unreadable."""

    def _at_once(self, raw: Any) -> Any:
        """Return the tokens of a record without a decode as a buffer of int32, quickly; None:
        ``_sample`` returns them, or says what is wrong."""
        return None

    def _parsed(self, raw: Any) -> Any:
        """Return the record that decode is given, or None. Any exception: a bad record."""
        return raw

    def _tokens(self, record: Any) -> dict[str, Any]:
        """Return the values of a record without a decode."""
        if not isinstance(record, dict) or record.get("tokens") is None:
            raise ValueError('a record without "tokens"; give decode= to make them')
        return {"tokens": token_ids(record["tokens"])}

    def _files(self) -> list[SourceFile]:
        """Return the files in the order of their names. Raises DataError, OSError."""
        return self.files.find()

    def _found(self) -> tuple[list[SourcePart], list[tuple[SourceFile, int]]]:
        with self._finding:
            if not self._parts:
                first = self.files.patterns[0] if self.files.patterns else "no file"
                try:
                    files = self._files()
                except OSError as error:
                    raise DataError(f"{first}: {error}") from error
                found = [part for each in self._all_named(files) for part in each]
                if not found:
                    raise DataError(f"{first}: {counted(len(files), 'file')} without a record")
                self._places = [(file, number) for _, file, number in found]
                self._parts = [part for part, _, _ in found]
            return self._parts, self._places

    def _all_named(self, files: list[SourceFile]) -> list[list[tuple[SourcePart, SourceFile, int]]]:
        """Return ``_named`` of each. Not with a pool of threads: at its end a process waits for
        those, and a file system may never answer."""
        found: list[list[tuple[SourcePart, SourceFile, int]]] = [[] for _ in files]
        failed: dict[int, BaseException] = {}
        places = iter(range(len(files)))

        def work() -> None:
            for place in places:
                if failed:
                    return
                try:
                    found[place] = self._named(files[place])
                except BaseException as error:  # noqa: BLE001 - raised again below
                    failed[place] = error

        helpers = []
        with suppress(RuntimeError):  # no further thread: this one works as well
            for _ in range(min(OPENING, len(files)) - 1):
                thread = threading.Thread(target=work, name="data files", daemon=True)
                thread.start()
                helpers.append(thread)
        work()
        for thread in helpers:
            thread.join()
        if failed:
            raise failed[min(failed)]
        return found

    def _named(self, file: SourceFile) -> list[tuple[SourcePart, SourceFile, int]]:
        try:
            return self._divided(self.files.sampled(file))
        except (OSError, Unreadable) as error:
            raise DataError(f"{file.name}: {error}") from error
        finally:
            self.listed += 1

    def _sample(self, name: str, index: int, raw: Any) -> dict[str, Any] | BadRecord | None:
        try:
            record = self._parsed(raw)
            if record is None:
                return None
            decoded = self._decode is not None  # else the tokens are an array of their own
            values = self._decoded(name, index, record) if decoded else self._tokens(record)
            if values is None:
                return None
            return None if "tokens" in values and not len(values["tokens"]) else values
        except (DataError, MemoryError):
            raise
        except ImportError as error:  # of this environment, and not of this record
            raise DataError(f"{name}: record {index}: {error}") from error
        except OSError as error:
            if of_the_system(error):
                raise
            return _bad(name, index, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this record's
            return _bad(name, index, error)

    def _decoded(self, name: str, index: int, record: Any) -> dict[str, Any] | None:
        assert self._decode is not None
        if self._parallel:
            return _arrays(self._decode(record))
        turn.begin(f"{name}: record {index}")
        try:
            return _arrays(self._decode(record))  # the next decode may use the same buffers
        finally:
            turn.end()


def _arrays(made: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if made is None else as_arrays(dict(made))


def _bad(name: str, index: int, error: Exception) -> BadRecord:
    return BadRecord(name, index, f"{type(error).__name__}: {error}")


def checked(options: Mapping[str, Any]) -> SourceOptions:
    """Return the options of a source. Raises DataError for one that is unknown or wrong."""
    for name in options:
        if name not in SourceOptions._fields:
            near = did_you_mean(name, SourceOptions._fields)
            raise DataError(f"a source has no option {name}={near or ''}")
    made = SourceOptions(**options)
    for name, least in (("lanes", 1), ("window", 1)):
        if type(getattr(made, name)) is not int or getattr(made, name) < least:
            raise DataError(f"a source's {name}={getattr(made, name)!r}; give a number >= {least}")
    for name, known in (("bad", ("error", "skip")), ("stalled", ("error", "wait", "hold back"))):
        if getattr(made, name) not in known:
            raise DataError(f"a source's {name}={getattr(made, name)!r}; it is one of {known}")
    if not 0 <= made.most_bad <= 1 or not made.patience > 0:
        raise DataError("a source's most_bad is a share from 0 to 1, and patience is > 0 seconds")
    return made
