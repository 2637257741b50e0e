"""Serves the ranks of one store: takes their messages, and gives their snapshots onward."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store import door, shelf
from robust_slurm.checkpoint.store.adoption import adopt
from robust_slurm.checkpoint.store.awaited import Awaited
from robust_slurm.checkpoint.store.disk.archive import Archive, StoreSettings
from robust_slurm.checkpoint.store.door import Message, RankConnection, RefusedError
from robust_slurm.checkpoint.store.events import (
    WITHDRAWN,
    AlarmEvent,
    Restore,
    ResumedEvent,
    StoreEvent,
    Target,
)
from robust_slurm.checkpoint.store.orders import Orders
from robust_slurm.checkpoint.store.pruning import USELESS, superseded
from robust_slurm.checkpoint.store.ranks import (
    Latest,
    StoreRank,
    read_enrolment,
    snapshot_path,
    took_a_place,
)
from robust_slurm.checkpoint.store.shelf import FETCHED, OWN, Shelf, ShelfRecord
from robust_slurm.checkpoint.transfer.pusher import Pusher
from robust_slurm.checkpoint.transfer.replicas import PeerServer

MAX_RANKS = 1024
MAX_ALARMS = 100  # of one connection


class Desk:
    """Calls ``due()`` if an event of a rank is to be reported later. ``peers``: the store's."""

    def __init__(
        self,
        store_shelf: Shelf,
        settings: StoreSettings,
        emit: Callable[[StoreEvent], None],
        due: Callable[[], None],
        peers: PeerServer,
    ) -> None:
        self._shelf = store_shelf
        self._settings = settings
        self._emit = emit
        self._due = due
        self._peers = peers
        self._lock = threading.RLock()
        self._placing = threading.Lock()
        self._epoch = 0
        self._line = 0  # the newest in this epoch: see Snapshot.line
        self.awaited = Awaited(store_shelf)
        self._ranks: dict[int, StoreRank] = {}
        self._targets: dict[int, Target | None] = {}
        self._everywhere = -1
        self.orders = Orders(self.ranks)
        self._all_here = settings.key is None  # then nobody says whether they are
        self.archive = Archive(store_shelf, settings, emit, self.ranks, lambda: self._all_here)

    # -- for the store

    def ranks(self) -> list[StoreRank]:
        with self._lock:
            return list(self._ranks.values())

    def begin(self, epoch: int, restore: Restore | None) -> None:
        """Begin the epoch; ``sweep`` follows. Nobody sends a replica until the next ``place``."""
        with self._lock:
            self._epoch, self._line = epoch, 0
            self._all_here = self._settings.key is None
            self._targets = {}  # whoever runs the rank now sends its replica
            self._everywhere = restore.step if restore is not None else -1
            self.orders.begin()
        self.awaited.begin(epoch, restore)
        for persister in self.archive.persisters():
            persister.forget("a new epoch began")

    def sweep(self, unwanted: Callable[[ShelfRecord], bool]) -> None:
        """Remove ``unwanted`` files, and torn ones; then replicas may be sent again."""
        self._shelf.drop(lambda record: record.kind != shelf.REPLICA and unwanted(record))
        for rank in self.ranks():
            self._shelf.remove_unknown(rank.number)
            rank.begin(self._epoch)

    def place(self, targets: Mapping[int, Target | None]) -> None:
        with self._lock:
            self._targets = dict(targets)
            self._all_here = True  # ranks are placed when all have enrolled
        for rank in self.ranks():
            self._place(rank)

    def _place(self, rank: StoreRank) -> None:
        with self._placing:  # so that an older placement never comes after a newer one
            rank.pusher.place(self._targets.get(rank.number))

    def persist_at(self, step: int) -> None:
        """See Store."""
        self.orders.persist_at(step)
        for rank in self.ranks():
            with self._lock:  # so that it does not begin anew meanwhile
                latest = rank.latest
                due = latest is not None and latest.step == step
                if latest is not None and due:
                    self.archive.persist(rank, latest)
            if due:
                rank.held_changed()

    def own(self, step: int) -> list[ShelfRecord]:
        """Return the snapshots that this store's ranks saved as this step in this epoch."""
        here = {rank.number for rank in self.ranks() if rank.enrolled == self._epoch}
        return [
            record
            for record in self._shelf.all()
            if record.kind == OWN and record.owner in here
            if (record.step, record.epoch) == (step, self._epoch)
        ]

    def complete(self, step: int, passed: int) -> None:
        """See Store."""
        with self._lock:
            self._everywhere = step if step >= 0 else self._everywhere
        for rank in self.ranks():
            rank.tell({"op": "complete", "step": step, "passed": passed})
        self._prune()

    # -- messages

    def gone(self, connection: RankConnection) -> None:
        rank = self._ranks.get(connection.rank)
        if rank is not None:
            rank.left(connection)

    def take(self, connection: RankConnection, message: Message) -> None:
        """Handle one message in the connection's thread. Raises RefusedError."""
        op = message["op"]
        if op == "enrol":
            self._enrol(connection, message)
            return
        rank = self._ranks.get(connection.rank)
        if rank is None or connection.epoch != self._epoch:
            raise RefusedError(f"{op}: enrol comes first")
        if op == "saved":
            self._saved(rank, connection, message)
        elif op == "skipped":
            rank.skipped(door.whole(message, "step"))
        elif op == "began":
            line = door.whole(message, "line") if "line" in message else 0
            self._began(rank, connection, door.whole(message, "step") + 1, line)
        elif op == "resumed":
            self._emit(ResumedEvent(connection.epoch, rank.number, door.whole(message, "step")))
        elif op == "unusable":
            self._unusable(rank, message)
        elif op == "slots":
            self._peers.limit(door.whole(message, "replicas", 10))
        elif op == "alarm":
            connection.alarms += 1
            if connection.alarms <= MAX_ALARMS:
                self._emit(AlarmEvent(rank.number, door.text(message, "text", 1 << 16)[:4096]))
        elif op == "flush":
            threading.Thread(
                target=self.archive.flush_rank,
                args=(rank, connection),
                name="ckpt-flush",
                daemon=True,
            ).start()
        else:
            raise RefusedError(f"{op!r} is not known")

    def _enrol(self, connection: RankConnection, message: Message) -> None:
        if connection.rank >= 0:
            raise RefusedError("enrol: only once in a connection")
        enrolment = read_enrolment(message)
        said, number = enrolment.said, enrolment.said.rank
        with self._lock:
            if said.epoch != self._epoch:
                raise RefusedError(f"enrol: epoch {said.epoch}, here it is {self._epoch}")
            known = self._ranks.get(number)
            first = known is None or known.enrolled != self._epoch
        unexpected = first and self.awaited.lacks(number)
        if unexpected:  # robust-srun must know where it is
            self._emit(said)
            self.awaited.wait(connection, number, said.epoch)
        with self._lock:
            if said.epoch != self._epoch:
                raise RefusedError(f"enrol: epoch {said.epoch}, here it is {self._epoch}")
            rank = self._ranks.get(number)
            if rank is None:
                if len(self._ranks) >= MAX_RANKS:
                    raise RefusedError(f"enrol: {MAX_RANKS} ranks are here already")
                rank = self._ranks[number] = self._new_rank(number)
                rank.pusher.begin(self._epoch)
            connection.rank, connection.epoch = number, said.epoch
            again = rank.enrolled == self._epoch
            goes_on = message.get("goes_on") is True
            anew, line = again and not goes_on, 0
            if not goes_on:
                rank.line = 0
                if anew or took_a_place(enrolment, self._ranks.values()):
                    line = max(int(time.time() * 1000), self._line + 1)
            if anew:  # somebody else (torchrun) has started all ranks anew within the epoch
                self._everywhere = -1
                self._anew(-1, 0)
                self._shelf.remove_unknown(number)  # a leftover could be taken for a new file
            if again:
                rank.restart(self._epoch, anew=anew)
            rank.enrol(enrolment, connection)
            plan = None if again else self.awaited.plan(number)
        own = []
        for record in self._shelf.of(number, OWN):
            with contextlib.suppress(OSError), open(self._shelf.open(record), "rb") as file:
                if not self._shelf.overwritten(file.fileno(), record):
                    own.append({"slot": record.slot, "step": record.step})
        if again:  # repeat what it may have missed: slots that are held, and orders
            rank.held_changed()
            self.orders.repeat(rank, after=self._everywhere)
        connection.send(
            {
                "op": "welcome", "restore": plan, "own": own,
                "directory": str(self._shelf.directory), "line": line, **self.orders.welcome,
            }
        )  # fmt: skip
        self._place(rank)
        if not unexpected:
            self._emit(said)
        self.archive.warm(rank)

    def _began(self, rank: StoreRank, connection: RankConnection, first: int, line: int) -> None:
        """Forget what a rank that begins anew had saved from step ``first`` on, and what others had
        here from then on in older timelines. ``line``: 0 if the ranks did not agree on one."""
        with self._lock:
            moved = line > rank.line and not rank.pusher.waits  # the timeline is new here
            if rank.connection is not connection or not (moved or rank.pusher.waits):
                return
            epoch = self._epoch
            rank.line, self._line = line, max(self._line, line)
            if moved:
                self._everywhere = -1
                rank.pusher.begin(epoch, anew=True)

            def old(record: ShelfRecord) -> bool:
                before = record.epoch == epoch and record.line < line
                return record.kind == OWN and (record.owner == rank.number or before)

            self._shelf.give_up(first, old)
            self._anew(first, line)
            rank.pusher.began(first, line)
        self.archive.give_up(rank)
        if moved:
            self._place(rank)

    def _anew(self, first: int, line: int) -> None:
        """Give up what is of step ``first`` or later, as a rank, and so all, begin anew within the
        epoch. -1: the step is not yet known. ``line``: see Snapshot."""
        if first >= 0:
            self._shelf.drop(lambda record: record.kind == FETCHED and record.step >= first)
        self._peers.anew(first, line)

    def _new_rank(self, number: int) -> StoreRank:
        settings = self._settings

        def pusher(rank: StoreRank) -> Pusher:
            return Pusher(
                number, self._shelf, settings.key, bandwidth=settings.bandwidth,
                patience=settings.patience, answer=rank.answer, changed=rank.held_changed,
                alarm=lambda text: self._emit(AlarmEvent(number, text)),
            )  # fmt: skip

        return StoreRank(
            number, self._emit, self._due, pusher, lambda r: self.archive.make(r.held_changed),
            lambda step: self._shelf.has(number, step),
        )  # fmt: skip

    def _saved(self, rank: StoreRank, connection: RankConnection, message: Message) -> None:
        enrolment = rank.enrolment
        assert enrolment is not None
        step = door.whole(message, "step")
        same = door.whole(message, "same") if message.get("same", -1) != -1 else -1
        path, slot, in_memory = snapshot_path(message, enrolment, self._shelf.directory)
        self._began(rank, connection, step, rank.line)  # if it has not said where it begins
        record: ShelfRecord | None = None
        try:
            fd, size, inode = shelf.open_snapshot(path)
            with rank.digesting, open(fd, "rb", buffering=0):
                if in_memory:
                    self._shelf.forget(path.name)
                    record = ShelfRecord(
                        path.name, step=step, world=enrolment.said.world,
                        needs=enrolment.said.needs, epoch=enrolment.said.epoch, size=size,
                        inode=inode, digest=digest.take(fd, size, digest.workers(4)), same=same,
                        line=rank.line,
                    )  # fmt: skip
                # A rank that does not wait may have overwritten this file during the digest.
                torn = "" if shelf.complete(fd) else shelf.TORN
                why = self._shelf.overwritten(fd, record) if record is not None else torn
                if why:
                    raise digest.FileChangedError(why)
                with self._lock:
                    if rank.connection is not connection or connection.epoch != self._epoch:
                        return  # a new epoch has begun, and swept
                    if record is not None:
                        self._shelf.put(record)
                    rank.latest = latest = Latest(step, slot, path, record)
                    rank.newest = max(rank.newest, step)
                    if message.get("persist") is True or self.orders.persists(step):
                        self.archive.persist(rank, latest)
        except OSError as err:
            rank.tell({"op": "unkept", "step": step, "why": str(err.strerror or err)})
            return
        rank.kept(step)
        if record is not None:
            rank.pusher.kept(record)
        else:
            rank.answer("alone", step)
        cost = Cost(*(door.seconds(message, name) for name in Cost._fields))
        rank.saved(step, size, door.seconds(message, "copy_s"), cost, connection.epoch, same)
        self._prune()

    def _prune(self) -> None:
        """Remove what can be no part of a common step any more."""
        here = {rank.number: rank.newest for rank in self.ranks() if rank.connection is not None}
        newest = min(here.values(), default=-1)
        oldest = newest - USELESS * self.orders.every
        self._shelf.drop(superseded(self._shelf.all(), here, self._everywhere, oldest))
        self._peers.prune(oldest)

    def _unusable(self, rank: StoreRank, message: Message) -> None:
        step, file = door.whole(message, "step"), door.text(message, "file")
        why = door.text(message, "why", 1 << 16)[:2000]
        torn = message.get("torn") is True  # else it is this file alone that cannot be read
        record = self._shelf.get(file)
        if record is not None and record.step == step:
            record.bad = WITHDRAWN + why if torn else f"rank {rank.number} could not use it: {why}"
        if torn:
            rank.pusher.withdraw(step)
        self._emit(AlarmEvent(rank.number, f"{file} of step {step} could not be used: {why}"))

    def adopt(self, rank: StoreRank) -> None:
        """Record complete snapshots of the rank whose ``saved`` message did not arrive."""
        adopt(self._shelf, rank, self._epoch, self._line, self._settings.write_deadline)
