"""Keeps one owner's replica up to date at its peer: a thread, a connection, the newest snapshot."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.format.digest import FileChangedError
from robust_slurm.checkpoint.store.events import Target
from robust_slurm.checkpoint.store.shelf import FETCHED, OWN, REPLICA, TORN, Shelf, ShelfRecord
from robust_slurm.checkpoint.transfer.channel import BrokenError, Channel, connect
from robust_slurm.checkpoint.transfer.sending import BREAKS, MARK, AbandonedError, Offer, send
from robust_slurm.checkpoint.transfer.throttle import Bucket

BACKOFF = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # s before the next try
REFUSED_PAUSE = 10.0  # s before a peer without room is asked again


class _RefusedError(Exception):
    """The peer cannot take the snapshot, and will not be able to soon."""


class Pusher:
    """``answer(op, step)`` tells the rank ``replicated`` or ``alone``; ``changed()`` says that
    ``held`` may have changed. All callbacks are called without a lock held."""

    def __init__(
        self,
        rank: int,
        shelf: Shelf,
        key: bytes | None,
        *,
        bandwidth: float,
        patience: float,
        answer: Callable[[str, int], None],
        changed: Callable[[], None],
        alarm: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._shelf = shelf
        self._key = key
        self._patience = patience
        self._answer = answer
        self._changed = changed
        self._alarm = alarm
        self._bucket = Bucket(bandwidth, time.monotonic())
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None
        self._target: Target | None = None
        self._epoch = 0
        self._waits = False
        self._turn = 0
        self._first = -1  # steps from here on were given up when its turn began; -1: none
        self._version = 0  # of target and epoch: what was begun under an older one is void
        self._sending: ShelfRecord | None = None
        self._marked: ShelfRecord | None = None
        self._reset()

    def _reset(self) -> None:
        self._version += 1
        self._peer_step = -1  # the newest that this target has
        self._withdrawn: list[int] = []  # steps that the target must not use
        self._lost = False
        self._last_good = time.monotonic()
        self._failures = 0
        if self._channel is not None:
            self._channel.close()

    # -- called by the store

    def begin(self, epoch: int, *, anew: bool = False) -> None:
        """A new epoch; alone until ``place``. ``anew``: the same, but the rank begins anew in it;
        nothing is sent until ``began``."""
        with self._change:
            if epoch != self._epoch:
                self._first, self._waits = -1, False
            self._waits = self._waits or anew
            self._epoch = epoch
            self._target = None
            self._reset()
            self._change.notify_all()

    @property
    def waits(self) -> bool:
        """True while the rank begins anew and its first step is not known yet."""
        with self._change:
            return self._waits

    def began(self, first: int, line: int) -> None:
        """The rank gave up what it had saved from step ``first`` on; the shelf has it no more.
        ``line``: see ``Snapshot``; 0 if there is no number."""
        with self._change:
            self._waits, self._first = False, first
            self._turn = line or self._turn + 1
            self._change.notify_all()

    def place(self, target: Target | None) -> None:
        """Replicate to ``target`` from now on. None: nowhere; the rank gets ``alone`` at once."""
        with self._change:
            if target == self._target:
                return
            self._target = target
            self._reset()
            newest = None if self._waits else self._newest()
            self._start()
            self._change.notify_all()
        if target is None and newest is not None:
            self._answer("alone", newest.step)

    def kept(self, record: ShelfRecord) -> None:
        """Push a new complete snapshot of the shelf."""
        with self._change:
            alone = self._target is None or self._key is None or self._lost
            self._start()
            self._change.notify_all()
        if alone:
            self._answer("alone", record.step)

    def withdraw(self, step: int) -> None:
        """Tell the peer that this step was wrong when the rank saved it."""
        with self._change:
            self._withdrawn.append(step)
            waits = self._peer_step < step  # for the replica, which may never be whole now
            self._change.notify_all()
        if waits:
            self._answer("alone", step)

    @property
    def held(self) -> set[int]:
        """The slot that must not be overwritten: it is still being sent, behind a newer one."""
        with self._change:
            record, newest = self._sending, self._newest()
        late = record is not None and newest is not None and newest.step > record.step
        return {record.slot} if late and record is not None and record.kind == OWN else set()

    def stop(self) -> list[threading.Thread]:
        with self._change:
            self._stop.set()
            if self._channel is not None:
                self._channel.close()
            self._change.notify_all()
            return [self._thread] if self._thread is not None else []

    # -- the thread

    def _start(self) -> None:
        if self._thread is None and self._target is not None and self._key is not None:
            self._thread = threading.Thread(target=self._run, name="ckpt-push", daemon=True)
            self._thread.start()

    def _newest(self) -> ShelfRecord | None:
        return next(iter(self._shelf.of(self._rank, OWN, FETCHED, REPLICA)), None)

    def _work(self) -> ShelfRecord | None:
        newest = None if self._target is None or self._waits else self._newest()
        return newest if newest is not None and newest.step > self._peer_step else None

    def _run(self) -> None:
        while True:
            with self._change:
                record = self._work()
                if self._stop.is_set():
                    break
                version, target = self._version, self._target
                withdrawn = self._withdrawn[0] if self._withdrawn and target is not None else None
                if record is None and withdrawn is None:
                    self._change.wait()
                    continue
                self._sending = record
                if not self._failures:
                    self._last_good = time.monotonic()
            assert target is not None
            try:
                if withdrawn is not None:
                    self._take_back(withdrawn, target, version)
                elif record is not None:
                    self._send(record, target, version)
            except (BrokenError, _RefusedError) as err:
                refused = isinstance(err, _RefusedError)
                self._failed(target, version, str(err), at_once=refused)
            except AbandonedError:
                pass
            except OSError as err:
                if self._channel is not None:
                    self._channel.close()  # in the middle of a chunk
                if record is not None:
                    self._spoilt(record, f"cannot be read: {err.strerror or err}")
            finally:
                with self._change:
                    self._sending = None
                self._changed()
        if self._channel is not None:
            self._channel.release()

    def _send(self, record: ShelfRecord, target: Target, version: int) -> None:
        try:
            fd = self._shelf.open(record)
        except OSError as err:
            if isinstance(err, FileChangedError) and str(err) != TORN:
                raise
            self._shelf.discard(record)
            return
        try:
            self._mark(fd, record)
            channel = self._connected(target, version)
            offer = Offer.of(record)
            channel.send(offer.message("offer"))
            reply = channel.receive()
            if reply["op"] == "no":
                raise _RefusedError(str(reply.get("why", ""))[:500])
            send(
                channel, fd, offer, reply, bucket=self._bucket, wait=self._stop.wait,
                still=lambda sent: self._still(fd, record, sent),
            )  # fmt: skip
        except AbandonedError as err:
            if self._shelf.overwritten(fd, record):
                self._shelf.discard(record)
            else:
                self._spoilt(record, str(err))
            raise
        finally:
            os.close(fd)
        with self._change:
            if version != self._version:
                return
            self._peer_step = max(self._peer_step, record.step)
            self._lost, self._failures = False, 0
            self._last_good = time.monotonic()
        self._answer("replicated", record.step)

    def _mark(self, fd: int, record: ShelfRecord) -> None:
        """Give each chunk a number of its own, or that of the snapshot offered before where it is
        the same, byte for byte: a peer that has a chunk of this number need not get it again."""
        if record.marks:
            return
        marks = [secrets.randbits(MARK) for _ in record.digest]
        older, self._marked = self._marked, record
        if older is not None:
            for index in self._shelf.unchanged(fd, record, older, digest.workers(4)):
                marks[index] = older.marks[index]
        record.marks = tuple(marks)
        with self._change:
            self._last_good = time.monotonic()  # that took as long as reading both files

    def _take_back(self, step: int, target: Target, version: int) -> None:
        channel = self._connected(target, version)
        with self._change:
            epoch = self._epoch
        channel.send({"op": "withdraw", "step": step, "epoch": epoch})
        channel.receive()
        with self._change:
            if version == self._version:
                self._withdrawn.remove(step)
                self._failures = 0

    def _still(self, fd: int, record: ShelfRecord, sent: int) -> str:
        """Reason why the transfer must end now; empty if it may go on. Each call counts as progress
        until BREAKS failures: a transfer that breaks starts over."""
        with self._change:
            if sent and self._failures < BREAKS:
                self._last_good = time.monotonic()
        return self._shelf.overwritten(fd, record)

    def _connected(self, target: Target, version: int) -> Channel:
        with self._change:
            channel = self._channel
        if channel is not None and not channel.closed:
            return channel
        if channel is not None:
            channel.release()
        assert self._key is not None

        def opened(channel: Channel) -> None:
            with self._change:
                self._channel = channel
                if version != self._version or self._stop.is_set():
                    channel.close()

        with self._change:
            self._channel = None
            hello = {"op": "push", "owner": self._rank, "epoch": self._epoch}
            if self._first >= 0:
                hello |= {"turn": self._turn, "first": self._first}
        channel = connect(target.host, target.port, self._key, self._patience / 2, opened)
        channel.send(hello)
        reply = channel.receive()
        if reply["op"] != "ready":
            raise BrokenError(str(reply.get("why", reply["op"]))[:500])
        return channel

    def _failed(self, target: Target, version: int, why: str, *, at_once: bool = False) -> None:
        """Wait before the next try; after ``patience`` without progress the rank is alone."""
        with self._change:
            if self._channel is not None:
                self._channel.close()
            if version != self._version or self._stop.is_set():
                return
            self._failures += 1
            over = at_once or time.monotonic() - self._last_good >= self._patience
            newly = over and not self._lost
            self._lost = self._lost or over
            newest = self._newest()
        if newly:
            self._alarm(
                f"no replica of rank {self._rank} at rank {target.rank} on {target.node} "
                f"({target.host}:{target.port}): {why}. Training continues; a loss of this rank's "
                "node now costs all steps since the last durable checkpoint"
            )
            if newest is not None:
                self._answer("alone", newest.step)
        with self._change:
            if version == self._version and not self._stop.is_set():
                pause = BACKOFF[min(self._failures, len(BACKOFF)) - 1]
                pause = REFUSED_PAUSE if at_once else pause
                deadline = time.monotonic() + pause
                while (left := deadline - time.monotonic()) > 0:
                    self._change.wait(left)
                    if version != self._version or self._stop.is_set():
                        break

    def _spoilt(self, record: ShelfRecord, why: str) -> None:
        record.bad = why
        self._alarm(f"the snapshot {record.file} of step {record.step} is not used: {why}")
        self._answer("alone", record.step)
