"""Moving one snapshot over a Channel: the same few messages for a replica and for a fetch.

The side that has the file sends, for each chunk that the other lacks, a sealed ``chunk`` message
with its CRC and then the bytes; after the last one ``end`` with the whole digest. So a snapshot can
be sent while its digest is still being taken. The side that gets it (``incoming``) holds each chunk
against the sealed CRC, and answers with the chunks it wants again, or with ``done``. What has been
received well is kept when the connection breaks, so the next one asks for the rest only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from robust_slurm.checkpoint import digest
from robust_slurm.checkpoint.channel import BrokenError, Channel, Message, number_list, numbers
from robust_slurm.checkpoint.shelf import Record
from robust_slurm.checkpoint.throttle import Bucket

ROUNDS = 3  # a chunk that arrives wrong this often is not sent again
MAX_NEEDS = 1 << 17
_T = TypeVar("_T")
_WAIT = 0.5  # s between two signs of life while the next chunk is being summed


class AbandonedError(Exception):
    """The sender has something better to send, or nothing good any more."""


class Offer:
    """What is sent: identity, size in bytes and digest of one snapshot.

    The digest is empty while it is still being taken: then it comes with the chunks.
    """

    __slots__ = ("digest", "epoch", "needs", "owner", "shared", "size", "step", "world")

    def __init__(
        self,
        owner: int,
        step: int,
        world: int,
        needs: tuple[int, ...],
        epoch: int,
        size: int,
        crcs: list[int],
        shared: int = -1,
    ) -> None:
        self.owner = owner
        self.step = step
        self.world = world
        self.needs = needs
        self.epoch = epoch
        self.size = size
        self.digest = crcs
        self.shared = shared
        """See ``Snapshot.same``."""

    def message(self, op: str) -> Message:
        return {
            "op": op, "owner": self.owner, "step": self.step, "world": self.world,
            "needs": self.needs, "epoch": self.epoch, "size": self.size, "digest": self.digest,
            "same": self.shared + 1,
        }  # fmt: skip

    @classmethod
    def read(cls, message: Message) -> Offer:
        """Raises BrokenError for one that contradicts itself."""
        owner, step, world, epoch, size, same = numbers(
            message, "owner", "step", "world", "epoch", "size", "same"
        )
        crcs = number_list(message, "digest", MAX_NEEDS, 1 << 32)
        needs = number_list(message, "needs", MAX_NEEDS, 1 << 31)
        if size <= 8 or len(crcs) not in (0, digest.count(size)):
            raise BrokenError(f"an offer of {size} bytes with {len(crcs)} digests")
        return cls(owner, step, world, tuple(needs), epoch, size, crcs, same - 1)

    @classmethod
    def of(cls, record: Record) -> Offer:
        return cls(
            record.owner, record.step, record.world, record.needs, record.epoch, record.size,
            record.digest, record.same,
        )  # fmt: skip

    def record(self, file: str, inode: int, crcs: list[int]) -> Record:
        """Of the file in which it is now complete."""
        return Record(
            file, step=self.step, world=self.world, needs=self.needs, epoch=self.epoch,
            size=self.size, inode=inode, digest=crcs, same=self.shared,
        )  # fmt: skip

    def alike(self, other: Offer) -> bool:
        """Whether both are of the same snapshot, as far as its name tells."""
        return (self.owner, self.step, self.epoch, self.size) == (
            other.owner, other.step, other.epoch, other.size,
        )  # fmt: skip

    def same(self, other: Offer) -> bool:
        """Whether both have the same content."""
        return self.alike(other) and self.digest == other.digest != []


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
        sums: digest.Sums | None = None,
    ) -> None:
        """``still(bytes sent)`` is asked before each chunk and before the end: what it
        answers ends the transfer. ``sums``: the digest, where it is still being taken."""
        self._channel = channel
        self._fd = fd
        self._offer = offer
        self._bucket = bucket if bucket is not None and bucket.piece else None
        self._wait = wait
        self._still = still
        self._sums = sums if sums is not None else digest.Sums.of(offer.digest)
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
                wrong = digest.differing(self._fd, size, self._whole(), chunks)
                if wrong:
                    self._drop(digest.describe(wrong, size))
            for index in chunks:
                self._ask_still()
                crc = self._await(partial(self._sums.crc, index, _WAIT))
                begin, length = digest.span(index, size)
                self._channel.send({"op": "chunk", "index": index, "crc": crc})
                self._channel.send_file(
                    self._fd, begin, length, self._pace if self._bucket is not None else None
                )
                self.sent += length
            self._ask_still()  # the last chunk may have been overwritten while it was sent
            self._channel.send({"op": "end", "digest": self._whole()})
            message, again = self._channel.receive(), True
        raise BrokenError("the peer asks again and again")

    def _ask_still(self) -> None:
        why = self._still(self.sent) if self._still is not None else ""
        if why:
            self._drop(why)

    def _whole(self) -> list[int]:
        return self._await(lambda: self._sums.whole(_WAIT))

    def _await(self, get: Callable[[], _T | None]) -> _T:
        """What is not None; until then the peer hears that this end is alive."""
        try:
            while (found := get()) is None:
                self._channel.send({"op": "busy"})
        except digest.WithdrawnError as err:
            self._drop(str(err))
        return found

    def _pace(self, left: int) -> int:
        assert self._bucket is not None
        piece = min(left, self._bucket.piece)
        wait = self._bucket.take(piece, time.monotonic())
        if wait:
            self._wait(wait)
        return piece

    def _drop(self, why: str) -> NoReturn:
        self._channel.send({"op": "drop", "why": why})
        raise AbandonedError(why)
