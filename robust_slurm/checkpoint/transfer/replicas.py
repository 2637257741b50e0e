"""The side of a store that other stores connect to: it receives replicas and sends snapshots."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable

from robust_slurm.checkpoint.store.events import WITHDRAWN
from robust_slurm.checkpoint.store.shelf import REPLICA, Shelf, ShelfRecord
from robust_slurm.checkpoint.transfer.channel import BrokenError, Channel, Message, numbers
from robust_slurm.checkpoint.transfer.incoming import Incoming
from robust_slurm.checkpoint.transfer.sending import AbandonedError, Offer, send
from robust_slurm.frames.lobby import Lobby
from robust_slurm.frames.wire import Codec

MAX_CONNECTIONS = 4096  # of peers that have the key
# As many as the owner has itself: with two, the loss of a node could leave no common step.
SLOTS = 3
HOLD = 10.0  # s for which an offer waits until all ranks are past the step before
TAKE_OVER = 5.0  # s for the older connection of an owner to end


class _Pair:
    """The replica slots of one owner; ``lock`` is held by the connection that fills them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taking = threading.Lock()
        """Held while an offer is taken; who holds it may change ``slots``."""
        self.channel: Channel | None = None
        self.slots: dict[int, Incoming] = {}


class PeerServer:
    """Serves each peer that has the key in a thread of its own."""

    def __init__(
        self,
        shelf: Shelf,
        key: bytes,
        idle: float,
    ) -> None:
        self._shelf = shelf
        self._key = key
        self._idle = idle
        self._lock = threading.Lock()
        self._channels: dict[Channel, threading.Thread] = {}
        self._pairs: dict[int, _Pair] = {}
        self._epoch = 0
        self._closed = False
        self._lobby: Lobby[Codec] | None = None
        self._slots = SLOTS
        self._everywhere = self._passed = -1
        self._turns: dict[int, int] = {}  # owner → how often it has begun anew, as it says
        self._fresh: set[int] = set()  # owners that have said it since the ranks here began anew
        self._more = threading.Condition()

    # -- called by the store

    def listen(self, listener: socket.socket) -> None:
        """Serve the peers that connect and prove that they have the key."""
        self._lobby = Lobby(
            listener, lambda: Codec(self._key, server=True), self._admit, "ckpt-peers"
        )

    def _admit(self, sock: socket.socket, codec: Codec, first: bytes) -> None:
        """Give a peer that has the key a thread. Raises RuntimeError, OSError."""
        with self._lock:
            if self._closed or len(self._channels) >= MAX_CONNECTIONS:
                sock.close()
                return
            channel = Channel(sock, codec, idle=self._idle, first=first)
            thread = threading.Thread(
                target=self._serve, args=(channel,), name="ckpt-peer", daemon=True
            )
            thread.start()
            self._channels[channel] = thread

    def begin(self, epoch: int, unwanted: Callable[[ShelfRecord], bool], step: int) -> None:
        """A new epoch: no replica comes in from the old one, and ``unwanted`` ones are removed."""
        with self._lock:
            self._epoch = epoch
            self._everywhere = self._passed = step  # all ranks resume from it; -1: from none here
            pairs = list(self._pairs.values())
            self._pairs = {}
            self._turns.clear()
            self._fresh.clear()
        for pair in pairs:
            if pair.channel is not None:
                pair.channel.close()
            if pair.lock.acquire(timeout=TAKE_OVER):
                with pair.taking:
                    for incoming in pair.slots.values():
                        self._let_go(incoming)
                    pair.slots.clear()
                pair.lock.release()
        self._shelf.drop(lambda record: record.kind == REPLICA and unwanted(record))

    def anew(self, first: int, line: int) -> None:
        """See Desk. Replicas whose owner has said that it begins anew are kept, unless they are of
        an older timeline."""
        with self._lock:
            if first < 0:
                self._fresh.clear()
                self._everywhere = self._passed = -1
                return
            for owner, pair in self._pairs.items():
                if owner not in self._fresh and pair.channel is not None:
                    pair.channel.close()
            fresh, epoch = self._fresh, self._epoch

            def old(record: ShelfRecord) -> bool:
                before = record.epoch == epoch and record.line < line
                return record.kind == REPLICA and (record.owner not in fresh or before)

            self._shelf.give_up(first, old)

    def limit(self, slots: int) -> None:
        """Keep no more than so many replicas of an owner; files beyond are removed."""
        self._slots = min(slots, SLOTS)
        self._shelf.drop(lambda record: record.kind == REPLICA and record.slot >= self._slots)
        with self._lock:
            pairs = list(self._pairs.values())
        for pair in pairs:
            if pair.taking.acquire(blocking=False):  # else the thread that holds it does so
                self._let_go_beyond(pair)
                pair.taking.release()

    def _let_go_beyond(self, pair: _Pair) -> None:
        for beyond in [n for n in pair.slots if n >= self._slots]:
            self._remove(pair.slots.pop(beyond))

    def complete(self, step: int, passed: int) -> None:
        """See Store."""
        with self._more:
            self._everywhere = step if step >= 0 else self._everywhere
            self._passed = passed
            self._more.notify_all()

    def prune(self, oldest: int) -> None:
        """Remove replicas of owners that send elsewhere now, when they are no use any more."""
        with self._lock:
            here = {o for o, pair in self._pairs.items() if pair.channel is not None}
            away = [(o, pair) for o, pair in self._pairs.items() if o not in here and pair.slots]
        replicas = [r for r in self._shelf.all() if r.kind == REPLICA and r.owner not in here]
        needed = {r.owner for r in replicas if r.step >= oldest}
        # In ``replicas``: one that has come since is not judged by these owners.
        self._shelf.drop(lambda r: r in replicas and r.owner not in needed)
        for owner, pair in away:
            if pair.taking.acquire(blocking=False):
                if not self._shelf.of(owner, REPLICA):
                    for incoming in pair.slots.values():
                        self._remove(incoming)
                    pair.slots.clear()
                pair.taking.release()

    def stop(self) -> list[threading.Thread]:
        """End all connections; the threads that will end now."""
        with self._lock:
            self._closed = True
            for channel in self._channels:
                channel.close()
            threads = list(self._channels.values())
        return threads if self._lobby is None else [*threads, self._lobby.close()]

    def clear(self) -> None:
        """Remove files that are only partly received."""
        for pair in self._pairs.values():
            for incoming in pair.slots.values():
                self._let_go(incoming)

    def _let_go(self, incoming: Incoming) -> None:
        """Keep the file if it is whole."""
        incoming.close()
        if not incoming.complete:
            self._remove(incoming)

    def _remove(self, incoming: Incoming) -> None:
        """Free its memory: an open file keeps it even when the file has no name any more."""
        incoming.close()
        record = self._shelf.get(incoming.path.name)
        if record is not None and record.inode == incoming.inode:
            self._shelf.discard(record)
        with contextlib.suppress(OSError):
            if incoming.path.lstat().st_ino == incoming.inode:
                incoming.path.unlink()

    # -- a connection's thread

    def _serve(self, channel: Channel) -> None:
        try:
            first = channel.receive()
            if first["op"] == "push":
                self._push(channel, first)
            elif first["op"] == "pull":
                self._pull(channel, first)
        except (BrokenError, AbandonedError, OSError):
            pass  # the other end notices, and connects again if it needs to
        finally:
            channel.release()
            with self._lock:
                self._channels.pop(channel, None)

    def _pull(self, channel: Channel, first: Message) -> None:
        owner, step = numbers(first, "owner", "step")
        record = self._shelf.source(owner, step)
        try:
            fd = self._shelf.open(record) if record is not None else -1
        except OSError:
            fd = -1
        if record is None or fd < 0:
            channel.send({"op": "no", "why": f"step {step} of rank {owner} is not there"})
            return
        offer = Offer.of(record)
        try:
            channel.send(offer.message("take"))

            def still(_sent: int) -> str:
                return self._shelf.overwritten(fd, record)

            send(channel, fd, offer, channel.receive(), still=still)
        except AbandonedError as err:
            if record is not None and not self._shelf.overwritten(fd, record):
                record.bad = str(err)
            raise
        finally:
            os.close(fd)

    def _push(self, channel: Channel, first: Message) -> None:
        owner, epoch = numbers(first, "owner", "epoch")
        with self._lock:
            if epoch != self._epoch:
                channel.send({"op": "wait", "why": f"epoch {epoch}, here it is {self._epoch}"})
                return
            pair = self._pairs.setdefault(owner, _Pair())
            older, pair.channel = pair.channel, channel
        if older is not None:
            older.close()
        if not pair.lock.acquire(timeout=TAKE_OVER):
            raise BrokenError("the older connection does not end")
        try:
            if "turn" in first:
                self._new_turn(owner, *numbers(first, "turn", "first"))
            channel.send({"op": "ready"})
            while True:
                message = channel.receive(forever=True)
                if message["op"] == "withdraw":
                    self._withdraw(owner, *numbers(message, "step", "epoch"))
                    channel.send({"op": "done"})
                    continue
                if message["op"] != "offer":
                    raise BrokenError(f"{message['op']} instead of an offer")
                offer = Offer.read(message)
                if offer.owner != owner:
                    raise BrokenError(f"an offer of rank {offer.owner}")
                with pair.taking:
                    try:
                        self._take(channel, pair, offer)
                    finally:  # fewer may be kept now than when it began
                        self._let_go_beyond(pair)
        finally:
            pair.lock.release()
            with self._lock:
                if pair.channel is channel:
                    pair.channel = None

    def _withdraw(self, owner: int, step: int, epoch: int) -> None:
        """Withdraw a replica that was wrong when it was made. Its slot is the next to be used."""
        for record in self._shelf.of(owner, REPLICA):
            if (record.step, record.epoch) == (step, epoch):
                record.bad = f"{WITHDRAWN}its owner says so"

    def _new_turn(self, owner: int, turn: int, first: int) -> None:
        with self._lock:
            if turn != self._turns.get(owner):
                self._turns[owner] = turn
                self._fresh.add(owner)
                self._shelf.give_up(first, lambda r: (r.kind, r.owner) == (REPLICA, owner))

    def _take(self, channel: Channel, pair: _Pair, offer: Offer) -> None:
        complete = self._shelf.of(offer.owner, REPLICA)
        if any(Offer.of(r) == offer for r in complete):
            channel.send({"op": "done"})
            return
        self._let_go_beyond(pair)

        def busy() -> None:
            channel.send({"op": "busy"})

        if not self._slots:
            why = f"{_host()} has room for the snapshots of its own ranks only"
            channel.send({"op": "no", "full": True, "why": why})
            return
        number = self._oldest({r.slot: r.step for r in complete}, busy)
        path = self._shelf.directory / f"replica-{offer.owner}-{number}.safetensors"
        self._shelf.forget(path.name)
        try:
            incoming = Incoming(path, offer, pair.slots.pop(number, None), busy=busy)
        except OSError as err:
            channel.send({"op": "no", "full": True, "why": self._why_not(err, offer.size)})
            return
        pair.slots[number] = incoming
        incoming.keep(complete, self._shelf.open, busy)
        try:
            incoming.receive(channel)
        except AbandonedError:
            return  # its room is used again
        record = offer.record(incoming.path.name, incoming.inode)
        with self._lock:  # not after begin() has swept
            if channel.closed or self._pairs.get(offer.owner) is not pair:
                raise BrokenError("another epoch began")
            self._shelf.put(record)
        channel.send({"op": "done"})

    def _oldest(self, taken: dict[int, int], busy: Callable[[], None]) -> int:
        """The slot to overwrite; ``taken``: slot → step. Of two, not the newest that all have."""
        newest = max(taken.values(), default=-1)
        if len(taken) == self._slots == 2:
            give_up_at = time.monotonic() + HOLD
            while self._passed < newest and time.monotonic() < give_up_at:
                busy()
                with self._more:
                    self._more.wait(0.2)
        kept = max((s for s in taken.values() if s <= self._everywhere), default=-1)
        free = [n for n in range(self._slots) if self._slots != 2 or taken.get(n) != kept]
        return min(free, key=lambda n: taken.get(n, -1))

    def _why_not(self, err: OSError, size: int) -> str:
        host = _host()
        if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            return f"{host} cannot make the file: {err.strerror}"
        info = os.statvfs(self._shelf.directory)
        return (
            f"{self._shelf.directory} of {host} is full: {size} bytes are needed, "
            f"{info.f_bavail * info.f_frsize} are free"
        )


def _host() -> str:
    return socket.gethostname().partition(".")[0]
