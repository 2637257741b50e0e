"""Files of a source: found by pattern or URL, opened, checked for changes, and decompressed."""

from __future__ import annotations

import glob
import hashlib
import io
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.errors import DataError
from robust_slurm.data.say import say
from robust_slurm.data.sources.zstd import ZstandardStream, zstandard
from robust_slurm.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from typing_extensions import Buffer

BUFFER = 1 << 18  # bytes that are read at a time
INSTALL = "pip install pyarrow zstandard fsspec"
WHOLE = 1 << 20  # bytes of a file that is looked at as a whole to know it again
BLOCKS, BLOCK = 8, 1 << 12  # of a larger one: blocks, and bytes of each


class SourceFile(NamedTuple):
    """A file as it was found."""

    name: str  # an absolute path, or a URL
    size: int
    version: tuple[int, int] = (0, 0)  # of a local file: its inode, and when it was written, ns
    samples: str = ""  # a digest of some of a local file's content


class Unreadable(Exception):
    """The rest of a file cannot be decompressed or parsed, however often it is read."""


class Files:
    """The files of a list of patterns, and the door to them. ``storage``: options for fsspec."""

    def __init__(
        self,
        patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        storage: Mapping[str, Any],
    ) -> None:
        if isinstance(patterns, (str, os.PathLike)):
            patterns = [os.fspath(patterns)]
        self.patterns = [_absolute(os.fspath(each)) for each in patterns]
        self._storage = dict(storage)

    def find(self) -> list[SourceFile]:
        """Return the files, each once, in the order of their names. Raises DataError, OSError."""
        found: dict[str, SourceFile] = {}
        known: dict[tuple[int, int], str] = {}
        for pattern in self.patterns:
            new = self._urls(pattern) if is_url(pattern) else _paths(pattern, known)
            if not new:
                raise DataError(f"{pattern}: no such file")
            found.update((file.name, file) for file in new)
        if not found:
            raise DataError("a source without files: its list of patterns is empty")
        once = set(known.values())
        files = [found[name] for name in sorted(found) if is_url(name) or name in once]
        if (more := len(found) - len(files)) and os.environ.get("RANK", "0") == "0":
            other = min(found.keys() - {file.name for file in files})
            say(f"{counted(more, 'path')}, as {other}, lead to files of the same source: read once")
        return files

    def sampled(self, file: SourceFile) -> SourceFile:
        """Return a local file with its ``samples``. Raises DataError, OSError."""
        if is_url(file.name):
            return file  # an answer of its server would be needed for each sample
        with self.open(file) as opened:
            return file._replace(samples=_samples(opened, file.size))

    def open(self, file: SourceFile) -> IO[bytes]:
        """Open a file, as it is stored. Raises DataError if it has another size than when it was
        found, or has been written since, with other samples of its content."""
        version = file.version
        if is_url(file.name):
            system, path = self._system(file.name)
            size = _answer(system.info, path)["size"]
            remote = _Remote(_answer(system.open, path, "rb"))
            opened: IO[bytes] = io.BufferedReader(remote, BUFFER)
        else:
            opened = open(file.name, "rb", buffering=BUFFER)  # noqa: SIM115 - the caller closes
            status = os.fstat(opened.fileno())
            size, version = status.st_size, _version(status)
        why = ""
        if size != file.size:
            why = f"{size} bytes, and {file.size} when it was found"
        elif version != file.version and file.samples and _samples(opened, size) != file.samples:
            why = "its content is not what it was when it was found"
        if why:
            opened.close()
            raise DataError(f"{file.name}: {why}; the files of a source must not change")
        return opened

    def _urls(self, pattern: str) -> list[SourceFile]:
        system, path = self._system(pattern)
        if glob.has_magic(path):
            found = _answer(partial(system.glob, detail=True), path)
        else:
            try:
                found = {path: _answer(system.info, path)}
            except FileNotFoundError:
                found = {}
        files = {
            str(system.unstrip_protocol(name)): info["size"]
            for name, info in found.items()
            if info["type"] == "file"
        }
        for name, size in files.items():
            if not isinstance(size, int):
                raise DataError(f"{name}: its server does not tell the size of the file")
        return [SourceFile(name, size) for name, size in files.items()]

    def _system(self, url: str) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise DataError(f"{url}: fsspec is not installed: {INSTALL}") from None
        try:
            system, path = url_to_fs(url, **self._storage)
        except (ImportError, ValueError) as error:  # a package for the scheme; no such scheme
            raise DataError(f"{url}: {error}") from error
        return system, path


class _Remote(io.RawIOBase):
    """A file of fsspec's, read through ``_answer``."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = _answer(self._file.read, len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._file.seek(offset, whence)  # some clients return nothing
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        with suppress(Exception):  # of a lost connection: it would hide what has been raised before
            self._file.close()
        super().close()


def _answer(ask: Callable[..., Any], *what: Any) -> Any:
    """Ask a server. Clients have errors of their own for a lost connection, or for "503 Service
    Unavailable", some of them an OSError without a number: whatever they raise may be over later,
    and is one that ``of_the_system`` knows here."""
    try:
        return ask(*what)
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and of_the_system(error):
            raise
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def decompressed(opened: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream of what the file holds: names in .gz and .zst are compressed."""
    if name.endswith((".gz", ".tgz")):
        import gzip

        return gzip.GzipFile(fileobj=opened)  # type: ignore[return-value]
    if name.endswith((".zst", ".zstd")):
        return io.BufferedReader(ZstandardStream(opened, name), BUFFER)
    return opened


def broken() -> tuple[type[BaseException], ...]:
    """Return the exceptions of a compressed file that is damaged or cut off."""
    import gzip
    import zlib

    kinds: list[type[BaseException]] = [EOFError, zlib.error, gzip.BadGzipFile]
    try:
        kinds.append(zstandard("").ZstdError)
    except DataError:
        pass  # then nothing raises it
    return tuple(kinds)


def of_the_system(error: OSError) -> bool:
    """True for an error of a file system or network, which may be over later; False for one by
    which a library says that a record or file is damaged: another process finds it the same."""
    kinds = (ConnectionError, TimeoutError, FileNotFoundError, PermissionError)
    return error.errno is not None or isinstance(error, kinds)


def is_url(name: str) -> bool:
    return "://" in name


def expanded(pattern: str) -> list[str]:
    """Return the paths that a local pattern matches; the path of just that name, if it exists."""
    if glob.has_magic(pattern) and not Path(pattern).exists():
        return glob.glob(pattern, recursive=True)  # noqa: PTH207 - not Path's rules for **
    return [pattern]


def _absolute(pattern: str) -> str:
    if pattern.startswith("file:///"):
        pattern = pattern[len("file://") :]
    return pattern if is_url(pattern) else str(Path(pattern).expanduser().absolute())


def _paths(pattern: str, known: dict[tuple[int, int], str]) -> list[SourceFile]:
    """Return the files of a pattern. ``known``: the one name by which each file is read, by its
    device and inode: links and ``..`` give a file others, too."""
    found = []
    for name in map(_plainly, expanded(pattern)):
        path = Path(name)
        if path.is_file():
            status = path.stat()
            found.append(SourceFile(name, status.st_size, _version(status)))
            inode = status.st_ino or hash(name)  # some file systems have none
            place = (status.st_dev, inode)
            if place in known and known[place] != name:
                name = min(name, known[place], key=lambda each: (_is_link(each), each))
            known[place] = name
    return found


def _is_link(name: str) -> bool:
    return os.path.realpath(name) != name


def _plainly(name: str) -> str:
    """Return a path without "..", where it leads to the same file."""
    if ".." not in Path(name).parts:
        return name
    plain = os.path.normpath(name)
    try:
        return plain if Path(plain).samefile(name) else name  # else one before ".." is a link
    except OSError:
        return name


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _samples(opened: IO[bytes], size: int) -> str:
    """Return a digest of a small file's content, or of blocks that are spread over a large one. The
    file is at its beginning before and after."""
    digest = hashlib.sha256()
    if size <= WHOLE:
        digest.update(opened.read(size))
    else:
        for number in range(BLOCKS):
            opened.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(opened.read(BLOCK))
    opened.seek(0)
    return digest.hexdigest()[:32]
