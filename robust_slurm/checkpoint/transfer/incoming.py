"""The receiving side of a transfer: a file that grows chunk by chunk, each checked by its CRC."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.format.crc import crc32
from robust_slurm.checkpoint.store.reserve import Reserve
from robust_slurm.checkpoint.store.shelf import ShelfRecord
from robust_slurm.checkpoint.transfer.channel import BrokenError, Channel, numbers
from robust_slurm.checkpoint.transfer.sending import ROUNDS, AbandonedError, Offer

_ROOM = 1 << 30  # bytes made room for at once
_GROUP = 64  # chunks between two calls of ``busy``
_PIECE = 1 << 20  # received, summed and written at once


class Incoming:
    """A file that is being received; torn (first eight bytes zero) until it is complete.

    Chunks are received straight into a mapping whose pages exist: that of the previous replica, or
    of prepared room. A file that is received only once, without such room, is written instead: the
    first touch of a mapped page costs more than copying it.
    """

    def __init__(
        self,
        path: Path,
        offer: Offer,
        reuse: Incoming | None = None,
        *,
        mapped: bool = True,
        room: Reserve | None = None,
        busy: Callable[[], None] = lambda: None,
    ) -> None:
        """OSError(ENOSPC) when there is not enough room; a mapped file takes it at once.

        ``reuse``: an older one at the same path whose room may be taken over; ``room``: prepared
        files, of which it takes one if there is any; ``mapped``: a file that was not prepared is
        mapped too; ``busy()`` is called now and then while room is being made.
        """
        self.path = path
        self.offer = offer
        self.received: int = reuse.received if reuse is not None else 0
        self.complete = False
        self._older = False  # the file holds an older snapshot, whole
        self._kept: frozenset[int] = frozenset()
        self._head = bytes(8)
        self._map: mmap.mmap | None = None
        self._fd = -1
        self.inode = 0
        if reuse is not None and reuse._usable(path, offer.size):
            self._fd, self._map, self.inode = reuse._fd, reuse._map, reuse.inode
            reuse._map, reuse._fd = None, -1
            self._older = reuse.complete
            os.pwrite(self._fd, bytes(8), 0)
            return
        if reuse is not None:
            reuse.close()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        there = room.take(offer.size, path) if room is not None else None
        if there is not None:
            flags &= ~(os.O_CREAT | os.O_EXCL)
        try:
            self._fd = os.open(path, flags, 0o600)
            if there is not None and there.is_whole(self._fd, offer.size):
                self._map = there.mapped
            elif there is not None:
                there.close()
            self._make_room(offer.size, mapped, room, busy)
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def _make_room(
        self, size: int, mapped: bool, room: Reserve | None, busy: Callable[[], None]
    ) -> None:
        if not self._fits(size) and room is not None:
            room.clear()  # what others could have used is of more use here
        if not self._fits(size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.inode = os.fstat(self._fd).st_ino
        os.ftruncate(self._fd, size)
        if not mapped or self._map is not None:
            return
        for at in range(0, size, _ROOM):
            os.posix_fallocate(self._fd, at, min(_ROOM, size - at))
            busy()
        self._map = mmap.mmap(self._fd, size)

    def _fits(self, size: int) -> bool:
        """True if there is room for the bytes that the file lacks."""
        there = os.fstatvfs(self._fd)
        has = os.fstat(self._fd).st_blocks * 512
        return there.f_bavail * there.f_frsize >= size - has

    def _usable(self, path: Path, size: int) -> bool:
        if self._map is None or (self.path, self.offer.size) != (path, size):
            return False
        try:  # unless it was removed or cut, or another store has put a file there
            info = path.lstat()
        except OSError:
            return False
        return (info.st_ino, info.st_size) == (self.inode, size)

    def keep(
        self,
        replicas: Iterable[ShelfRecord],
        opened: Callable[[ShelfRecord], int],
        busy: Callable[[], None],
    ) -> None:
        """Take from older replicas of the owner the chunks that have not changed since, so that
        they need not be sent. A chunk whose CRC is not the offered one is asked for all the same.
        ``busy()``: as above. For a mapped file. Raises BrokenError, OSError."""
        offer, found = self.offer, set[int]()
        for record in sorted(replicas, key=lambda r: r.file != self.path.name):
            both = zip(offer.marks, record.marks, strict=False)
            same = {i for i, (one, other) in enumerate(both) if one == other} - found - {0}
            if record.size != offer.size or not same:
                continue
            if record.file != self.path.name:
                try:
                    self._copy(opened(record), same, busy)
                except OSError:
                    continue  # it is gone: they are sent
            elif not self._older:
                continue
            found |= same
        chunks = sorted(found)
        for at in range(0, len(chunks), _GROUP):
            busy()
            group, threads = chunks[at : at + _GROUP], digest.workers(4)
            found -= {*digest.differing(self._fd, offer.size, offer.digest, group, threads)}
        self._kept = frozenset(found)

    def _copy(self, fd: int, chunks: Iterable[int], busy: Callable[[], None]) -> None:
        """Copy these chunks of the same size of file, which is closed."""
        assert self._map is not None
        with open(fd, "rb", buffering=0), memoryview(self._map) as whole:
            for number, index in enumerate(sorted(chunks)):
                if number % _GROUP == 0:
                    busy()
                begin, length = digest.span(index, self.offer.size)
                with whole[begin : begin + length] as piece:
                    os.preadv(fd, [piece], begin)  # what is missing shows in the CRC

    def receive(self, channel: Channel) -> None:
        """Take chunks until none is wrong. Raises BrokenError, AbandonedError, OSError."""
        wrong = [i for i in range(digest.count(self.offer.size)) if i not in self._kept]
        for _ in range(ROUNDS):
            channel.send({"op": "go", "chunks": wrong})
            wrong = self._round(channel, wrong)
            if not wrong:
                os.pwrite(self._fd, self._head, 0)
                self.complete = True
                return
        why = "after several tries " + digest.describe(wrong, self.offer.size)
        channel.send({"op": "no", "why": why})
        raise AbandonedError(why)

    def _round(self, channel: Channel, asked: list[int]) -> list[int]:
        """Take what was asked for; the chunks of it that are not what the digest says."""
        left, wrong = set(asked), []
        while (message := channel.receive())["op"] == "chunk":
            (index,) = numbers(message, "index")
            if index not in left:
                raise BrokenError(f"chunk {index} was not asked for")
            left.discard(index)
            if self._chunk(channel, index) != self.offer.digest[index]:
                wrong.append(index)
        if message["op"] == "drop":
            raise AbandonedError(str(message.get("why", ""))[:500])
        if message["op"] != "end" or left:
            raise BrokenError(f"{message['op']} among chunks")
        return wrong

    def _chunk(self, channel: Channel, index: int) -> int:
        """Receive one chunk into the file. Returns its CRC."""
        begin, length = digest.span(index, self.offer.size)
        crc, end = 0, begin + length
        if index == 0:  # these come last into the file
            head = bytearray(8)
            channel.receive_into(memoryview(head))
            self._head, crc, begin = bytes(head), crc32(head), 8
        buffer = memoryview(bytearray(min(_PIECE, length)) if self._map is None else self._map)
        with buffer:
            for at in range(begin, end, _PIECE):
                count = min(_PIECE, end - at)
                piece = buffer[:count] if self._map is None else buffer[at : at + count]
                with piece:
                    channel.receive_into(piece)
                    crc = crc32(piece, crc)  # while it is in the processor's cache
                    if self._map is None:
                        _write(self._fd, piece, at)
        self.received += length
        return crc

    def close(self) -> None:
        """Close the descriptor and the mapping; the file stays."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a traceback still has a view: freed with it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        at, data = at + written, data[written:]
