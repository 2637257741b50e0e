"""The receiving side of a transfer: a file that grows chunk by chunk, each held against its CRC."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from robust_slurm.checkpoint import digest
from robust_slurm.checkpoint.channel import BrokenError, Channel, Message, number_list, numbers
from robust_slurm.checkpoint.crc import crc32
from robust_slurm.checkpoint.reserve import Reserve
from robust_slurm.checkpoint.transfer import MAX_NEEDS, ROUNDS, AbandonedError, Offer

_ROOM = 1 << 30  # bytes made room for at once
_PIECE = 1 << 20  # received, summed and written while it is in the processor's cache
_AHEAD = 6  # pieces that may wait to be summed and written


class Behind:
    """A thread that does jobs in their order while its owner receives more.

    At the end of the ``with`` all are done; what one of them raised is raised there.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ckpt-behind", daemon=True)
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def do(self, job: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as err:
                self._error = self._error or err

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jobs.put(None)
        self._thread.join()
        if self._error is not None:  # also instead of a broken connection: chunks are lost
            raise self._error


def _now(job: Callable[[], None]) -> None:
    job()


class _Chunk:
    """One chunk that is being received."""

    def __init__(self, index: int, crc: int, head: bytes) -> None:
        self.index = index
        self.expected = crc
        self.head = head
        self.crc = crc32(head)

    def add(self, piece: memoryview) -> None:
        self.crc = crc32(piece, self.crc)


class Incoming:
    """A file that is being received; torn (first eight bytes zero) until it is complete.

    What comes is received straight into a mapping whose pages are there, that of the replica before
    or of prepared room, and summed by a second thread. What is received once and without such room
    is written instead (by the second thread where there are cores): the first touch of a mapped
    page costs more than copying it.
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
        self.missing = list(range(digest.count(offer.size)))
        self.received = 0
        self.complete = False
        self._crcs = [-1] * len(self.missing)
        self._head = bytes(8)
        self._map: mmap.mmap | None = None
        self._fd = -1
        self.inode = 0
        if reuse is not None and reuse._usable(path, offer.size):
            self._fd, self._map, self.inode = reuse._fd, reuse._map, reuse.inode
            reuse._map, reuse._fd = None, -1
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
        """Whether there is room for what the file lacks."""
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

    @property
    def digest(self) -> list[int]:
        """Of the complete file."""
        return list(self._crcs)

    def resume(self, offer: Offer) -> bool:
        """Whether what is here already is a part of this offer; then it goes on with it."""
        if not self.offer.alike(offer):
            return False
        self.offer = offer
        if offer.digest:
            self._hold_against(offer.digest)
        return True

    def _hold_against(self, crcs: list[int]) -> None:
        self.missing = [index for index, crc in enumerate(crcs) if crc != self._crcs[index]]

    def receive(self, channel: Channel) -> None:
        """Take chunks until none is missing. Raises BrokenError, AbandonedError, OSError."""
        for _ in range(ROUNDS):
            channel.send({"op": "go", "chunks": self.missing})
            with Behind() as behind:
                message = self._round(channel, behind)
            if message["op"] == "drop":
                raise AbandonedError(str(message.get("why", ""))[:500])
            if message["op"] != "end":
                raise BrokenError(f"{message['op']} among chunks")
            crcs = number_list(message, "digest", MAX_NEEDS, 1 << 32)
            if len(crcs) != len(self._crcs):
                raise BrokenError(f"{len(crcs)} digests for {self.offer.size} bytes")
            self._hold_against(crcs)
            if not self.missing:
                os.pwrite(self._fd, self._head, 0)
                self.complete = True
                return
        why = "after several tries " + digest.describe(self.missing, self.offer.size)
        channel.send({"op": "no", "why": why})
        raise AbandonedError(why)

    def _round(self, channel: Channel, behind: Behind) -> Message:
        """Take what was asked for; the message that is no chunk any more."""
        left = set(self.missing)
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        # Where cores are few, to hand pieces over costs more than it gains; one buffer stays in
        # the cache.
        do, ahead = (behind.do, _AHEAD) if digest.workers(2) > 1 else (_now, 1)
        for _ in range(ahead if self._map is None else 0):
            buffers.put(memoryview(bytearray(min(_PIECE, self.offer.size))))
        while (message := channel.receive())["op"] == "chunk":
            index, crc = numbers(message, "index", "crc")
            if index not in left:
                raise BrokenError(f"chunk {index} was not asked for")
            left.discard(index)
            begin, length = digest.span(index, self.offer.size)
            head = bytearray(8 if index == 0 else 0)  # these come last into the file
            if head:
                channel.receive_into(memoryview(head))
            chunk = _Chunk(index, crc, bytes(head))
            if self._map is not None:
                self._into_map(channel, behind, chunk, begin + len(head), begin + length)
            else:
                self._into_file(channel, do, chunk, begin + len(head), begin + length, buffers)
            self.received += length
        return message

    def _into_map(
        self, channel: Channel, behind: Behind, chunk: _Chunk, begin: int, end: int
    ) -> None:
        assert self._map is not None
        with memoryview(self._map) as whole:
            for at in range(begin, end, _PIECE):
                piece = whole[at : min(at + _PIECE, end)]
                channel.receive_into(piece)
                behind.do(partial(self._sum, chunk, piece))
        behind.do(partial(self._arrived, chunk))

    @staticmethod
    def _sum(chunk: _Chunk, piece: memoryview) -> None:
        with piece:
            chunk.add(piece)

    def _into_file(
        self,
        channel: Channel,
        do: Callable[[Callable[[], None]], None],
        chunk: _Chunk,
        begin: int,
        end: int,
        buffers: queue.SimpleQueue[memoryview],
    ) -> None:
        for at in range(begin, end, _PIECE):
            buffer = buffers.get()
            piece = buffer[: min(_PIECE, end - at)]
            channel.receive_into(piece)
            do(partial(self._keep, chunk, piece, at, partial(buffers.put, buffer)))
        do(partial(self._arrived, chunk))

    def _keep(self, chunk: _Chunk, piece: memoryview, at: int, done: Callable[[], None]) -> None:
        try:
            chunk.add(piece)  # then it is in this processor's cache
            while piece:
                written = os.pwrite(self._fd, piece, at)
                at += written
                piece = piece[written:]
        finally:
            done()

    def _arrived(self, chunk: _Chunk) -> None:
        """All of it is in the file; it counts if it is what its CRC says."""
        if chunk.crc == chunk.expected:
            if chunk.index == 0:
                self._head = chunk.head
            self._crcs[chunk.index] = chunk.crc
            self.missing.remove(chunk.index)

    def close(self) -> None:
        """Let go of the file; it stays."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a traceback still has a view: freed with it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
