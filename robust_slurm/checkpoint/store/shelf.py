"""The snapshot files in a store's directory, with checks that they are still unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from robust_slurm.checkpoint.format import digest, layout
from robust_slurm.checkpoint.store.events import Holding

OWN, FETCHED, REPLICA = "own", "fetched", "replica"
_NAME = re.compile(r"(own|replica|fetched)-(0|[1-9]\d{0,8})-(0|[1-9]\d{0,17})\.safetensors")
MAX_SLOT = 100
TORN = "torn: it was being overwritten"


class ShelfRecord:
    """A complete snapshot file: what was true of it when it was complete."""

    def __init__(
        self,
        file: str,
        *,
        step: int,
        world: int,
        needs: tuple[int, ...],
        epoch: int,
        size: int,
        inode: int,
        digest: list[int],
        same: int = -1,
        line: int = 0,
    ) -> None:
        kind, owner, _ = parse_name(file)
        self.file = file
        self.kind = kind
        self.owner = owner
        self.step = step
        self.world = world
        self.needs = needs
        self.epoch = epoch
        self.size = size
        self.inode = inode
        self.digest = digest
        self.same = same
        self.line = line
        """See ``Snapshot``."""
        self.marks: tuple[int, ...] = ()
        """A number for each chunk's content: equal numbers mean equal bytes (see ``Pusher._mark``).
        Empty: unknown."""
        self.header = b""
        """Hash of its header, once that was parsed and found right: parsing takes milliseconds."""
        self.bad = ""

    @property
    def slot(self) -> int:
        """Slot of an own or replica file."""
        return parse_name(self.file)[2]


def parse_name(file: str) -> tuple[str, int, int]:
    """Kind, owner, and slot (or step, of fetched). ValueError for any other name."""
    match = _NAME.fullmatch(file)
    if match is None or (match[1] != FETCHED and int(match[3]) >= MAX_SLOT):
        raise ValueError(f"{file!r} is no name of a snapshot file")
    return match[1], int(match[2]), int(match[3])


def open_snapshot(path: Path) -> tuple[int, int, int]:
    """Open a file that somebody else wrote. Returns descriptor, size, inode.

    OSError when it is no regular file of this user, or a link.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file of this user")
        return fd, info.st_size, info.st_ino
    except BaseException:
        os.close(fd)
        raise


def complete(fd: int) -> bool:
    """False while a snapshot is being written into the file."""
    return any(os.pread(fd, 8, 0))


class Shelf:
    """The records of one store's files; all methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._records: dict[str, ShelfRecord] = {}

    def put(self, record: ShelfRecord) -> None:
        """Record a complete file, in place of what it held before."""
        with self._lock:
            self._records[record.file] = record

    def forget(self, file: str) -> None:
        """Forget a file that is going to be overwritten."""
        with self._lock:
            self._records.pop(file, None)

    def discard(self, record: ShelfRecord) -> None:
        """Forget this record, but not one that has taken its place for the same file."""
        with self._lock:
            if self._records.get(record.file) is record:
                del self._records[record.file]

    def give_up(self, first: int, which: Callable[[ShelfRecord], bool]) -> None:
        """Forget these records from step ``first`` on. Their files stay: a rank may be writing."""
        for record in self.all():
            if record.step >= first and which(record):
                self.discard(record)

    def remove(self, file: str) -> None:
        """Forget and unlink, unless another store has put its own file there."""
        with self._lock:
            record = self._records.pop(file, None)
        path = self.directory / file
        with contextlib.suppress(OSError):
            if record is None or path.lstat().st_ino == record.inode:
                path.unlink()

    def remove_unknown(self, owner: int) -> None:
        """Remove files of a rank of this store that are no complete snapshots."""
        for path in self.directory.glob(f"{OWN}-{owner}-*{layout.SUFFIX}"):
            if self.get(path.name) is None:
                with contextlib.suppress(OSError):
                    path.unlink()

    def all(self) -> list[ShelfRecord]:
        with self._lock:
            return list(self._records.values())

    def get(self, file: str) -> ShelfRecord | None:
        with self._lock:
            return self._records.get(file)

    def of(self, owner: int, *kinds: str) -> list[ShelfRecord]:
        """Newest first; those known to be bad left out."""
        found = [r for r in self.all() if r.owner == owner and r.kind in kinds and not r.bad]
        return sorted(found, key=lambda r: -r.step)

    def has(self, owner: int, step: int) -> bool:
        """True if the owner's own snapshot of the step is here and not known to be bad."""
        return any(record.step == step for record in self.of(owner, OWN))

    def source(self, owner: int, step: int) -> ShelfRecord | None:
        """A file to give to others, of the newest timeline."""
        found = [r for r in self.all() if (r.owner, r.step) == (owner, step) and not r.bad]
        kinds = (OWN, FETCHED, REPLICA)
        return min(found, key=lambda r: (-r.epoch, -r.line, kinds.index(r.kind)), default=None)

    def open(self, record: ShelfRecord) -> int:
        """Open a record's file. FileNotFoundError when it is not the record's any more,
        FileChangedError when it was cut short or made longer."""
        fd, size, inode = open_snapshot(self.directory / record.file)
        if inode != record.inode or size != record.size:
            torn = not complete(fd)
            os.close(fd)
            if inode == record.inode:
                size_now = f"its size is {size} bytes, not {record.size}: somebody changed it"
                raise digest.FileChangedError(TORN if torn else size_now)
            raise FileNotFoundError(f"{record.file} has been replaced")
        return fd

    def overwritten(self, fd: int, record: ShelfRecord) -> str:
        """Reason why the file is not (any more) the snapshot of the record; empty when it is."""
        try:
            if not complete(fd):
                return TORN
            return header_of(fd, record)
        except OSError as err:
            return f"cannot be read: {err.strerror or err}"

    def unchanged(
        self, fd: int, record: ShelfRecord, older: ShelfRecord, threads: int
    ) -> list[int]:
        """Return the chunks of a snapshot (open as ``fd``) that are the same in an older one.

        Both files are read: equal CRCs prove nothing here. Empty if either is overwritten meanwhile
        (even by the same step: a rank that began anew may have written it into the same file)."""
        if record.size != older.size:
            return []
        digests = enumerate(zip(record.digest, older.digest, strict=True))
        among = [index for index, (crc, before) in digests if crc == before]
        try:
            with open(self.open(older), "rb", buffering=0) as file:
                same = digest.alike(fd, file.fileno(), record.size, among, threads)
                torn = self.overwritten(file.fileno(), older) or self.overwritten(fd, record)
        except OSError:
            return []
        return [] if torn or self.get(older.file) is not older else same

    def verify(self, record: ShelfRecord, threads: int) -> Holding | None:
        """Read the whole file (nothing with 0 threads). None when another has taken its place."""
        why = record.bad
        try:
            fd = self.open(record)
        except FileNotFoundError:
            self.discard(record)
            return None
        except digest.FileChangedError as err:
            if str(err) == TORN:
                if threads:
                    self.discard(record)
            else:
                record.bad = record.bad or str(err)
            return self._holding(record, record.bad or TORN)
        except OSError as err:
            return self._holding(record, f"cannot be opened: {err.strerror or err}")
        try:
            why = why or self.overwritten(fd, record)
            if not why and threads:
                wrong = digest.differing(fd, record.size, record.digest, threads=threads)
                if wrong:  # unless a rank has begun to write over it meanwhile
                    why = self.overwritten(fd, record)
                    why = why or digest.describe(wrong, record.size)
                    record.bad = why
        except OSError as err:
            why = str(err.strerror or err)
        finally:
            os.close(fd)
        if why == TORN and threads:  # without threads, a look keeps the record
            self.discard(record)
        return self._holding(record, why)

    def verify_all(self, records: Iterable[ShelfRecord], threads: int) -> list[Holding]:
        found = (self.verify(record, threads) for record in records)
        return [holding for holding in found if holding is not None]

    @staticmethod
    def _holding(record: ShelfRecord, why: str) -> Holding:
        return Holding(
            record.owner, record.step, record.world, record.needs,
            "replica" if record.kind == REPLICA else "memory",
            record.file, record.size, not why, why, record.epoch, record.same, record.line,
        )  # fmt: skip

    def drop(self, unwanted: Callable[[ShelfRecord], bool]) -> None:
        """Remove all files for which ``unwanted`` holds."""
        for record in [each for each in self.all() if unwanted(each)]:
            self.remove(record.file)


def read_header(fd: int, size: int) -> layout.Snapshot:
    """Read a snapshot's header. Raises LayoutError, OSError."""
    return layout.parse_header(_head(fd, size), size)[0]


def _head(fd: int, size: int) -> bytes:
    """The header's length and the header, of a file of ``size`` bytes. Raises OSError."""
    head = os.pread(fd, 8, 0)
    length = min(int.from_bytes(head, "little"), layout.MAX_HEADER + 1, size)
    return head + os.pread(fd, length, 8)


def header_of(fd: int, record: ShelfRecord) -> str:
    """Reason why the header is not that of the record; empty when it is."""
    head = _head(fd, record.size)
    mark = hashlib.blake2b(head, digest_size=16).digest()
    if mark == record.header:
        return ""
    try:
        snapshot = layout.parse_header(head, record.size)[0]
    except layout.LayoutError as err:
        return str(err)
    if snapshot.rank != record.owner:
        return f"it is of rank {snapshot.rank}"
    found = snapshot.step, snapshot.epoch, snapshot.line
    if found != (record.step, record.epoch, record.line):
        return f"it was overwritten by step {snapshot.step} of epoch {snapshot.epoch}"
    record.header = mark
    return ""
