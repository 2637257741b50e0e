"""Getting snapshots from other stores into the store's directory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.format.threads import share
from robust_slurm.checkpoint.store.events import FetchOutcome, WantedSnapshot
from robust_slurm.checkpoint.store.reserve import Reserve
from robust_slurm.checkpoint.store.shelf import FETCHED, Shelf
from robust_slurm.checkpoint.transfer.channel import (
    BrokenError,
    Channel,
    NotListeningError,
    connect,
)
from robust_slurm.checkpoint.transfer.incoming import Incoming
from robust_slurm.checkpoint.transfer.sending import BREAKS, AbandonedError, Offer

PAUSE = 0.2  # s between two tries
PARALLEL = 8
REFUSED = 2.0  # s until a peer where nobody listens is given up


class _Failed(Exception):
    """This source cannot give it."""


class Fetcher:
    """Gets snapshots. ``idle``: s without progress until a source is given up. ``room``: memory
    that was prepared for them. ``name``: of the store, several may share a directory."""

    def __init__(
        self,
        shelf: Shelf,
        key: bytes | None,
        room: Reserve,
        idle: float,
        name: str,
    ) -> None:
        self._shelf = shelf
        self._room = room
        self._key = key
        self._idle = idle
        self._name = name
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._files: dict[str, threading.Lock] = {}  # a recovery cut short leaves its fetch running

    def stop(self) -> None:
        """Stop from another thread, once: all that is still missing fails, and whatever follows."""
        self._stop.set()
        with self._lock:
            for channel in self._channels:
                channel.close()

    def run(self, wanted: Sequence[WantedSnapshot], deadline: float) -> list[FetchOutcome]:
        """``deadline``: s for each item. Outcomes in the order of ``wanted``."""
        results: list[FetchOutcome | None] = [None] * len(wanted)
        todo = iter(range(len(wanted)))  # ``next`` on it is atomic

        def work() -> None:
            for place in todo:
                results[place] = self._one(wanted[place], deadline)

        share(work, min(PARALLEL, len(wanted)), "ckpt-fetch")
        return [outcome for outcome in results if outcome is not None]

    def _one(self, item: WantedSnapshot, deadline: float) -> FetchOutcome:
        began = time.monotonic()
        file, why, count = "", "", 0
        try:
            file, count = self._get(item, began + deadline)
        except _Failed as err:
            why = str(err)
        except OSError as err:
            why = f"cannot be stored in {self._shelf.directory}: {err.strerror or err}"
        seconds = time.monotonic() - began
        return FetchOutcome(item.owner, item.step, not why, why, file, seconds, count)

    def _get(self, item: WantedSnapshot, give_up_at: float) -> tuple[str, int]:
        file = f"{FETCHED}-{item.owner}-{item.step}.safetensors"
        with self._lock:
            alone = self._files.setdefault(file, threading.Lock())
        if not alone.acquire(timeout=max(0.0, give_up_at - time.monotonic())):
            raise _Failed("another fetch of it does not end")
        try:
            return self._bring(item, file, give_up_at)
        finally:
            alone.release()

    def _bring(self, item: WantedSnapshot, file: str, give_up_at: float) -> tuple[str, int]:
        there = self._shelf.get(file)
        if there is not None:
            holding = self._shelf.verify(there, digest.workers(4))
            if holding is not None and holding.ok:
                return file, 0
            self._shelf.remove(file)
        if self._key is None:
            raise _Failed("this store has no peers")
        return self._from_peer(item, file, give_up_at)

    def _from_peer(self, item: WantedSnapshot, file: str, give_up_at: float) -> tuple[str, int]:
        # Stores of a node share the directory.
        part = self._shelf.directory / f"{file}.{self._name}.part"
        place = f"{item.host}:{item.port}"
        good_at, had, breaks = time.monotonic(), 0, 0
        incoming: Incoming | None = None
        try:
            while incoming is None or not incoming.complete:
                try:
                    with self._asked(item, give_up_at) as (channel, offer):
                        incoming = Incoming(part, offer, incoming, mapped=False, room=self._room)
                        incoming.receive(channel)
                        channel.send({"op": "done"})
                    continue
                except AbandonedError as err:
                    raise _Failed(f"{place}: {err}") from None
                except BrokenError as err:
                    why, refused = str(err), isinstance(err, NotListeningError)
                now = time.monotonic()
                if incoming is not None and incoming.received > had:
                    good_at, had, breaks = now, incoming.received, breaks + 1
                patience = min(self._idle, REFUSED) if refused else self._idle
                late = now - good_at >= patience or now >= give_up_at
                if late or breaks >= BREAKS or self._stop.is_set():
                    raise _Failed(f"{place}: {why}")
                self._stop.wait(PAUSE)
            part.rename(self._shelf.directory / file)
            self._shelf.put(incoming.offer.record(file, incoming.inode))
            return file, incoming.received
        finally:
            if incoming is not None:
                incoming.close()
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _asked(self, item: WantedSnapshot, give_up_at: float) -> Iterator[tuple[Channel, Offer]]:
        """A connection on which a peer offers what is wanted; ``stop`` ends it.

        Raises BrokenError when it may work later, AbandonedError when not.
        """
        assert self._key is not None

        def opened(channel: Channel) -> None:
            with self._lock:
                self._channels.add(channel)
                if self._stop.is_set():
                    channel.close()

        channel = connect(item.host, item.port, self._key, self._idle, opened)
        try:
            channel.give_up_at = give_up_at
            channel.send({"op": "pull", "owner": item.owner, "step": item.step})
            reply = channel.receive()
            if reply["op"] != "take":
                raise AbandonedError(str(reply.get("why", reply["op"]))[:500])
            offer = Offer.read(reply)
            if (offer.owner, offer.step) != (item.owner, item.step):
                raise AbandonedError(f"it offers step {offer.step} of rank {offer.owner}")
            yield channel, offer
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.release()
