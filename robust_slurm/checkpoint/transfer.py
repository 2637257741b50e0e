"""Moving one snapshot over a Channel: the same few messages for a replica and for a fetch.

The side that has the file sends, for each chunk that the other lacks, a sealed ``chunk`` message
and then the bytes; after the last one ``end``. The side that gets it holds each chunk against the
sealed digest, and answers with the chunks it wants again, or with ``done``. What has been received
well is kept when the connection breaks, so the next one asks for the rest only.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from robust_slurm.checkpoint import digest
from robust_slurm.checkpoint.channel import BrokenError, Channel, Message, number_list, numbers
from robust_slurm.checkpoint.shelf import Record
from robust_slurm.checkpoint.throttle import Bucket

ROUNDS = 3  # a chunk that arrives wrong this often is not sent again
MAX_NEEDS = 1 << 17
_ROOM = 1 << 30  # bytes made room for at once
_PIECE = 1 << 20  # received, summed and written while it is in the processor's cache


class AbandonedError(Exception):
    """The sender has something better to send, or nothing good any more."""


class Offer:
    """What is sent: identity, size in bytes and digest of one snapshot."""

    __slots__ = ("digest", "epoch", "needs", "owner", "size", "step", "world")

    def __init__(
        self,
        owner: int,
        step: int,
        world: int,
        needs: tuple[int, ...],
        epoch: int,
        size: int,
        crcs: list[int],
    ) -> None:
        self.owner = owner
        self.step = step
        self.world = world
        self.needs = needs
        self.epoch = epoch
        self.size = size
        self.digest = crcs

    def message(self, op: str) -> Message:
        return {
            "op": op, "owner": self.owner, "step": self.step, "world": self.world,
            "needs": self.needs, "epoch": self.epoch, "size": self.size, "digest": self.digest,
        }  # fmt: skip

    @classmethod
    def read(cls, message: Message) -> Offer:
        """Raises BrokenError for one that contradicts itself."""
        owner, step, world, epoch, size = numbers(
            message, "owner", "step", "world", "epoch", "size"
        )
        crcs = number_list(message, "digest", MAX_NEEDS, 1 << 32)
        needs = number_list(message, "needs", MAX_NEEDS, 1 << 31)
        if size <= 8 or len(crcs) != digest.count(size):
            raise BrokenError(f"an offer of {size} bytes with {len(crcs)} digests")
        return cls(owner, step, world, tuple(needs), epoch, size, crcs)

    @classmethod
    def of(cls, record: Record) -> Offer:
        return cls(
            record.owner, record.step, record.world, record.needs, record.epoch, record.size,
            record.digest,
        )  # fmt: skip

    def record(self, file: str, inode: int) -> Record:
        """Of the file in which it is now complete."""
        return Record(
            file, step=self.step, world=self.world, needs=self.needs, epoch=self.epoch,
            size=self.size, inode=inode, digest=self.digest,
        )  # fmt: skip

    def same(self, other: Offer) -> bool:
        return (self.owner, self.step, self.epoch, self.size, self.digest) == (
            other.owner, other.step, other.epoch, other.size, other.digest,
        )  # fmt: skip


class Incoming:
    """A file that is being received; torn (first eight bytes zero) until it is complete.

    A replica is received straight into a mapping, which is cheapest when the room is used again
    and again. What is received once is written instead: the first touch of a mapped page costs
    more than copying it.
    """

    def __init__(
        self,
        path: Path,
        offer: Offer,
        reuse: Incoming | None = None,
        *,
        mapped: bool = True,
        busy: Callable[[], None] = lambda: None,
    ) -> None:
        """OSError(ENOSPC) when there is not enough room; a mapped file takes it at once.

        ``reuse``: an older one at the same path whose room may be taken over; ``busy()`` is called
        now and then while room is being made.
        """
        self.path = path
        self.offer = offer
        self.missing = list(range(digest.count(offer.size)))
        self.received = 0
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
        self._fd = os.open(path, flags, 0o600)
        try:
            self._make_room(offer.size, mapped, busy)
        except BaseException:
            self.close()
            path.unlink()
            raise

    def _make_room(self, size: int, mapped: bool, busy: Callable[[], None]) -> None:
        room = os.fstatvfs(self._fd)
        if room.f_bavail * room.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.inode = os.fstat(self._fd).st_ino
        if not mapped:
            os.ftruncate(self._fd, size)
            return
        for at in range(0, size, _ROOM):
            os.posix_fallocate(self._fd, at, min(_ROOM, size - at))
            busy()
        self._map = mmap.mmap(self._fd, size)

    def _usable(self, path: Path, size: int) -> bool:
        if self._map is None or (self.path, self.offer.size) != (path, size):
            return False
        try:  # unless it was removed or cut, or another store has put a file there
            info = path.lstat()
        except OSError:
            return False
        return (info.st_ino, info.st_size) == (self.inode, size)

    def receive(self, channel: Channel) -> None:
        """Take chunks until none is missing. Raises BrokenError, AbandonedError, OSError."""
        for _ in range(ROUNDS):
            channel.send({"op": "go", "chunks": self.missing})
            left = set(self.missing)
            while (message := channel.receive())["op"] == "chunk":
                (index,) = numbers(message, "index")
                if index not in left:
                    raise BrokenError(f"chunk {index} was not asked for")
                if self._take(channel, index):
                    left.discard(index)
                    self.missing.remove(index)
            if message["op"] == "drop":
                raise AbandonedError(str(message.get("why", ""))[:500])
            if message["op"] != "end":
                raise BrokenError(f"{message['op']} among chunks")
            if not self.missing:
                os.pwrite(self._fd, self._head, 0)
                return
        why = "after several tries " + digest.describe(self.missing, self.offer.size)
        channel.send({"op": "no", "why": why})
        raise AbandonedError(why)

    def _take(self, channel: Channel, index: int) -> bool:
        """Receive one chunk. False when it is not what the digest says."""
        begin, length = digest.span(index, self.offer.size)
        head = bytearray(8 if index == 0 else 0)  # these come last into the file
        if head:
            channel.receive_into(memoryview(head))
        fill = self._into_map if self._map is not None else self._into_file
        crc = fill(channel, begin + len(head), begin + length, zlib.crc32(head))
        self.received += length
        if crc != self.offer.digest[index]:
            return False
        if index == 0:
            self._head = bytes(head)
        return True

    def _into_map(self, channel: Channel, begin: int, end: int, crc: int) -> int:
        assert self._map is not None
        with memoryview(self._map) as view, view[begin:end] as chunk:
            channel.receive_into(chunk)
            return zlib.crc32(chunk, crc)

    def _into_file(self, channel: Channel, begin: int, end: int, crc: int) -> int:
        buffer = memoryview(bytearray(min(_PIECE, end - begin)))
        while begin < end:
            piece = buffer[: end - begin]
            channel.receive_into(piece)
            crc = zlib.crc32(piece, crc)
            while piece:
                written = os.pwrite(self._fd, piece, begin)
                begin += written
                piece = piece[written:]
        return crc

    def close(self) -> None:
        """Let go of the file; it stays."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a traceback still has a view: freed with it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Outgoing:
    """The sending side of one snapshot."""

    def __init__(
        self,
        channel: Channel,
        fd: int,
        offer: Offer,
        *,
        bucket: Bucket | None = None,
        wait: Callable[[float], object] = time.sleep,
        still: Callable[[int], str] | None = None,
    ) -> None:
        """``still(bytes sent)`` is asked before each chunk; what it answers ends the transfer."""
        self._channel = channel
        self._fd = fd
        self._offer = offer
        self._bucket = bucket if bucket is not None and bucket.piece else None
        self._wait = wait
        self._still = still
        self.sent = 0

    def send(self, first: Message) -> None:
        """Send what the peer asks for (``first``: its answer to the offer) until it has all.

        Raises BrokenError; AbandonedError when ``still`` said so, or the file itself is not what
        its digest says; FileChangedError, OSError of the file.
        """
        size, message, again = self._offer.size, first, False
        for _ in range(ROUNDS + 1):
            if message["op"] == "done":
                return
            if message["op"] != "go":
                raise BrokenError(f"{message['op']} instead of go: {message.get('why', '')}"[:500])
            chunks = number_list(message, "chunks", MAX_NEEDS, digest.count(size))
            if again:
                wrong = digest.differing(self._fd, size, self._offer.digest, chunks)
                if wrong:
                    self._drop(digest.describe(wrong, size))
            for index in chunks:
                why = self._still(self.sent) if self._still is not None else ""
                if why:
                    self._drop(why)
                begin, length = digest.span(index, size)
                self._channel.send({"op": "chunk", "index": index})
                self._channel.send_file(
                    self._fd, begin, length, self._pace if self._bucket is not None else None
                )
                self.sent += length
            self._channel.send({"op": "end"})
            message, again = self._channel.receive(), True
        raise BrokenError("the peer asks again and again")

    def _pace(self, left: int) -> int:
        assert self._bucket is not None
        piece = min(left, self._bucket.piece)
        wait = self._bucket.take(piece, time.monotonic())
        if wait:
            self._wait(wait)
        return piece

    def _drop(self, why: str) -> None:
        self._channel.send({"op": "drop", "why": why})
        raise AbandonedError(why)
