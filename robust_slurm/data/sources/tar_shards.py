"""Tar archives as WebDataset writes them: files of one name with several endings are a record."""

from __future__ import annotations

import json
import tarfile
from typing import IO, TYPE_CHECKING, Any

from robust_slurm.data.sources.common import FileSource
from robust_slurm.data.sources.files import Unreadable, broken, decompressed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from robust_slurm.data.sources.common import Decode, Patterns
    from robust_slurm.data.sources.files import SourceFile

    Members = list[tuple[str, bytes]]


def tar(
    files: Patterns,
    decode: Decode | None = None,
    *,
    parallel: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> TarShards:
    """Return a source of tar archives (.tar, .tar.gz, .tgz, .tar.zst). ``files``: paths, patterns
    or fsspec URLs.

    Files that follow one another and differ only in what comes after the first point of their
    name are a record. ``decode`` is given a dict: "__key__" is the name they share, and the bytes
    of each file by its ending ("jpg", "cls.txt"). Without it, "tokens" of "json" are taken. To go
    on within a plain archive, the headers before are read; a compressed one is decompressed.
    Raises DataError.
    """
    return TarShards(files, decode, parallel, storage_options, options)


class TarShards(FileSource):
    """A source of tar archives."""

    def _records(
        self, file: SourceFile, number: int, start: int
    ) -> Iterator[tuple[int, tuple[str, Members]]]:
        damaged: tuple[type[BaseException], ...] = (tarfile.TarError, *broken())
        with self.files.open(file) as stored:
            try:
                key, index = "", -1
                members: Members = []
                for name, ending, archive, member in _members(stored, file.name):
                    if name != key or index < 0:
                        if index >= start:
                            yield index, (key, members)
                        key, index, members = name, index + 1, []
                    if index >= start:
                        content = archive.extractfile(member)
                        members.append((ending, content.read() if content is not None else b""))
                if index >= start:
                    yield index, (key, members)
            except damaged as error:
                raise Unreadable(str(error)) from error

    def _parsed(self, raw: tuple[str, Members]) -> dict[str, Any]:
        key, members = raw
        record: dict[str, Any] = {"__key__": key}
        for ending, content in members:
            if ending in record:
                raise ValueError(f"{key} has two files .{ending}")
            record[ending] = content
        return record

    def _tokens(self, record: Any) -> dict[str, Any]:
        if "json" not in record:
            raise ValueError(f"{record['__key__']} has no .json; give decode= to make arrays")
        return super()._tokens(json.loads(record["json"]))


def _members(
    stored: IO[bytes], name: str
) -> Iterator[tuple[str, str, tarfile.TarFile, tarfile.TarInfo]]:
    """Yield (name up to its first point, ending, archive, member) of the files in an archive."""
    stream = decompressed(stored, name)
    mode: Any = "r:" if stream is stored else "r|"
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would remember all
            folder, slash, base = member.name.rpartition("/")
            stem, point, ending = base.partition(".")
            about = base.startswith("__") and base.endswith("__")
            if member.isreg() and stem and point and not about:
                yield folder + slash + stem, ending.lower(), archive, member
        if stream is stored:  # else the decompressor knows
            stored.seek(archive.offset)
            if stored.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise Unreadable("the archive ends without its end mark")
