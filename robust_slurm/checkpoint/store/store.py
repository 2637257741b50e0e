"""The Store: holds the snapshots of the ranks of one task slot, whatever becomes of the ranks.

It runs in robust-task (or, without robust-srun, in the training process itself). A rank writes its
snapshot into a file in the store's directory and reports it through a unix socket (``door``). The
store takes its digest (``digest``), records it (``shelf``), sends it to the peer that keeps the
rank's replica (``pusher`` → the peer's ``replicas``), and has it written to the durable tier
(``persist``). After a fault, ``stock`` lists what is left and intact, and ``fetch`` gets what a
rank lacks. Threads use blocking sockets: the bulk of the work releases the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store.desk import Desk
from robust_slurm.checkpoint.store.disk.archive import StoreSettings
from robust_slurm.checkpoint.store.door import Door
from robust_slurm.checkpoint.store.events import (
    FetchOutcome,
    Holding,
    Restore,
    StoreEvent,
    Target,
    WantedSnapshot,
)
from robust_slurm.checkpoint.store.pruning import give_way
from robust_slurm.checkpoint.store.reserve import Reserve
from robust_slurm.checkpoint.store.shelf import Shelf, ShelfRecord
from robust_slurm.checkpoint.transfer.fetching import Fetcher
from robust_slurm.checkpoint.transfer.replicas import PeerServer

CLOSE = 4.0  # s for the threads to end


class Store:
    """See the module. All methods may be called from any thread; ``stock``, ``fetch``, ``flush``
    and ``close`` block. ``emit`` is called from the store's threads and must not block."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        key: bytes | None,
        emit: Callable[[StoreEvent], None],
        bandwidth: float = 0.0,
        patience: float = 10.0,
        write_deadline: float = 600.0,
    ) -> None:
        """``bandwidth``: bytes/s for each owner's replica, 0 for no limit. ``patience``: s without
        progress until a peer counts as lost. ``write_deadline``: s for the writer's answer, beside
        what the size takes. Raises OSError."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        settings = StoreSettings(key, bandwidth, patience, write_deadline)
        self._shelf = Shelf(directory)
        self.room = Reserve(directory, name)
        # Without a key it listens to nobody.
        self._peers = PeerServer(self._shelf, key or b"", patience / 2)
        self._desk = Desk(self._shelf, settings, emit, self._wake, self._peers)
        self.orders = self._desk.orders
        self._door = Door(self._desk.take, self._desk.gone)
        self._fetcher = Fetcher(self._shelf, key, self.room, patience, name)
        self._closing = threading.Lock()
        self._closed = False
        self.socket_path = directory / f"{name}.sock"
        self.port = 0
        self._selector = selectors.DefaultSelector()
        self._waking = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        try:
            self._listen(peers=key is not None)
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._keep, name="ckpt-store", daemon=True)
        self._thread.start()

    def _listen(self, *, peers: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._selector.register(listener, selectors.EVENT_READ, self._door.accept)
        listener.setblocking(False)
        listener.bind(str(self.socket_path))
        self.socket_path.chmod(0o600)
        listener.listen(128)
        if not peers:
            return
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        else:
            listener = socket.create_server(("", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self._peers.listen(listener)

    # -- what the supervisor asks

    def begin(self, epoch: int, restore: Restore | None) -> None:
        """Begin an epoch from ``restore``, and remove newer snapshots, which it gives up."""
        keep = restore.step if restore is not None and restore.tier == "memory" else -1
        planned = set(restore.shards.values()) if restore is not None and keep >= 0 else set()

        def unwanted(record: ShelfRecord) -> bool:
            return record.step > keep and record.file not in planned

        self.room.clear()  # the ranks need it now
        self._desk.begin(epoch, restore)
        self._door.close_all()
        self._peers.begin(epoch, unwanted, keep)
        self._desk.sweep(unwanted)

    def place(self, targets: Mapping[int, Target | None]) -> None:
        """The whole placement of this store's ranks. A rank that is not in it is alone."""
        self._desk.place(targets)

    def stock(self, step: int | None = None, *, read: bool = True) -> list[Holding]:
        """All snapshots that are here (or those of one step), their digests verified now.

        Reads all of them: seconds per 10 GB and thread. Without ``read``, only their headers are
        checked.
        """
        for rank in self._desk.ranks():
            self._desk.adopt(rank)
        threads = digest.workers(8)
        records = [r for r in self._shelf.all() if step is None or r.step == step]
        return self._shelf.verify_all(records, threads if read else 0)

    def fetch(
        self, wanted: Sequence[WantedSnapshot], deadline: float = 600.0
    ) -> list[FetchOutcome]:
        """Get snapshots, in parallel; ``deadline``: s for each. Outcomes in the order of
        ``wanted``."""
        give_way(self._shelf, self._desk.ranks(), wanted)
        return self._desk.awaited.fetch(lambda: self._fetcher.run(wanted, deadline))

    def persist_at(self, step: int) -> None:
        """The snapshot of this step goes to the durable tier when it comes (or if it is here)."""
        self._desk.persist_at(step)

    def complete(self, step: int, passed: int) -> None:
        """Note that all ranks and their replicas have ``step`` (-1: no new one is known): what is
        older may be overwritten. No rank has a step up to ``passed`` on its way."""
        self._desk.complete(step, passed)
        self._peers.complete(step, passed)

    def flush(
        self, owners: Sequence[tuple[int, str]], step: int, commit_world: int, deadline: float
    ) -> list[FetchOutcome]:
        """Write these holdings (owner, file) of ``step`` to the durable tier and wait.

        ``commit_world`` > 0: commit as well, when so many ranks have written; a CommittedEvent
        tells how it went. Other stores may write for as long as this one: whoever sent the flush
        waits no longer when one of them fails. Outcomes in the order of ``owners``.
        """
        began = time.monotonic()
        results: dict[int, FetchOutcome] = {}
        change = threading.Condition()

        def finished(outcome: FetchOutcome) -> None:
            with change:
                results[outcome.owner] = outcome
                change.notify_all()

        for place, (owner, file) in enumerate(owners):
            commit = commit_world if place == 0 else 0
            why = self._desk.archive.flush_one(owner, file, step, commit, deadline, finished)
            if why:
                finished(FetchOutcome(owner, step, False, why, file, 0.0, 0))
        with change:
            while len(results) < len(dict(owners)):
                left = began + deadline - time.monotonic()
                if left <= 0 or self._closed:
                    break
                change.wait(min(left, 0.5))
            late = f"not written within {deadline:g} s"
            return [
                results.get(owner) or FetchOutcome(owner, step, False, late, file, deadline, 0)
                for owner, file in owners
            ]

    def children(self) -> list[int]:
        """Processes that must not be ended with the rank."""
        return [persister.pid for persister in self._desk.archive.persisters() if persister.pid]

    def close(self) -> None:
        """End everything and remove the files. Returns within seconds, whatever hangs."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._fetcher.stop()
        self._wake()
        self.room.close()
        threads = [self._thread, *self._door.stop(), *self._peers.stop()]
        for rank in self._desk.ranks():
            threads += rank.pusher.stop()
        for persister in self._desk.archive.persisters():
            threads += persister.stop()
        give_up_at = time.monotonic() + CLOSE
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        self._peers.clear()
        self._shelf.drop(lambda _record: True)
        for rank in self._desk.ranks():
            self._shelf.remove_unknown(rank.number)
        with contextlib.suppress(OSError):
            self._directory.rmdir()  # the last store of the directory does it

    # -- inside

    def _wake(self) -> None:
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _keep(self) -> None:
        """The thread that accepts connections and reports what was put off."""
        while not self._closed:
            waits = [wait for rank in self._desk.ranks() if (wait := rank.report()) > 0]
            for key, _ in self._selector.select(min(waits, default=None)):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                    continue
                listener = key.fileobj
                assert isinstance(listener, socket.socket)
                try:
                    sock, _ = listener.accept()
                    key.data(sock)
                except OSError:  # gone again, or no descriptor is left
                    time.sleep(0.01)
        self._release()

    def _release(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        with self._waking:
            os.close(self._wake_fd)
            self._wake_fd = -1
        with contextlib.suppress(OSError):
            self.socket_path.unlink()
