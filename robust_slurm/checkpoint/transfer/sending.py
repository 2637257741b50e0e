"""Move one snapshot over a Channel: the same few messages for a replica and for a fetch.

The sender offers the file with its digest. The receiver (``incoming``) answers ``go`` with the
chunks that it wants: first all that it does not have (see ``ShelfRecord.marks``), then those that
arrived wrong. The sender sends a sealed ``chunk`` message and the bytes of each, and ``end`` after
the last one. When all chunks are what the digest says, the receiver answers ``done``. A transfer
that breaks starts over: it costs seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store.shelf import ShelfRecord
from robust_slurm.checkpoint.transfer.channel import (
    BrokenError,
    Channel,
    Message,
    number_list,
    numbers,
)
from robust_slurm.checkpoint.transfer.throttle import Bucket

ROUNDS = 3  # a chunk that arrives wrong this often is not sent again
BREAKS = 3  # transfers in a row that may break although they had begun well
MAX_NEEDS = 1 << 17
MARK = 48  # bits


class AbandonedError(Exception):
    """The transfer is given up: the snapshot was overwritten, is damaged or is not there."""


class Offer(NamedTuple):
    """Offer of one snapshot: identity, size in bytes and digest."""

    owner: int
    step: int
    world: int
    needs: tuple[int, ...]
    epoch: int
    size: int
    digest: list[int]
    same: int = -1
    line: int = 0
    """See ``Snapshot``."""
    marks: tuple[int, ...] = ()
    """See ``ShelfRecord.marks``."""

    def message(self, op: str) -> Message:
        return {"op": op, **self._asdict(), "same": self.same + 1}

    @classmethod
    def read(cls, message: Message) -> Offer:
        """Read an offer. Raises BrokenError for one that contradicts itself."""
        owner, step, world, epoch, size, same, line = numbers(
            message, "owner", "step", "world", "epoch", "size", "same", "line"
        )
        crcs = number_list(message, "digest", MAX_NEEDS, 1 << 32)
        needs = number_list(message, "needs", MAX_NEEDS, 1 << 31)
        marks = number_list(message, "marks", MAX_NEEDS, 1 << MARK)
        if size <= 8 or len(crcs) != digest.count(size) or len(marks) not in (0, len(crcs)):
            raise BrokenError(f"an offer of {size} bytes with {len(crcs)} digests")
        return cls(
            owner, step, world, tuple(needs), epoch, size, crcs, same - 1, line, tuple(marks)
        )

    @classmethod
    def of(cls, record: ShelfRecord) -> Offer:
        return cls(
            record.owner, record.step, record.world, record.needs, record.epoch, record.size,
            record.digest, record.same, record.line, record.marks,
        )  # fmt: skip

    def record(self, file: str, inode: int) -> ShelfRecord:
        """Return the record of the file in which the snapshot is now complete."""
        record = ShelfRecord(
            file, step=self.step, world=self.world, needs=self.needs, epoch=self.epoch,
            size=self.size, inode=inode, digest=self.digest, same=self.same, line=self.line,
        )  # fmt: skip
        record.marks = self.marks
        return record


def send(
    channel: Channel,
    fd: int,
    offer: Offer,
    reply: Message,
    *,
    bucket: Bucket | None = None,
    wait: Callable[[float], object] = time.sleep,
    still: Callable[[int], str] = lambda _sent: "",
) -> None:
    """Send what the peer asks for (``reply``: its answer to the offer) until it has all.

    ``still(bytes sent)`` is called before each chunk and before the end: a reason that it returns
    ends the transfer. Raises BrokenError; AbandonedError for such a reason, or if the file itself
    is not what its digest says; FileChangedError, OSError of the file.
    """

    def drop(why: str) -> None:
        if why:
            channel.send({"op": "drop", "why": why})
            raise AbandonedError(why)

    def pace(left: int) -> int:
        if bucket is None or not bucket.piece:
            return left
        piece = min(left, bucket.piece)
        wait(bucket.take(piece, time.monotonic()))
        return piece

    size, sent = offer.size, 0
    for attempt in range(ROUNDS + 1):
        if reply["op"] == "done":
            return
        if reply["op"] != "go":
            raise BrokenError(f"{reply['op']} instead of go: {reply.get('why', '')}"[:500])
        chunks = number_list(reply, "chunks", MAX_NEEDS, digest.count(size))
        if attempt and (wrong := digest.differing(fd, size, offer.digest, chunks)):
            drop(digest.describe(wrong, size))
        for index in chunks:
            drop(still(sent))
            channel.send({"op": "chunk", "index": index})
            channel.send_file(fd, *digest.span(index, size), pace)
            sent += digest.span(index, size)[1]
        drop(still(sent))  # the last chunk may have been overwritten while it was sent
        channel.send({"op": "end"})
        reply = channel.receive()
    raise BrokenError("the peer asks again and again")
