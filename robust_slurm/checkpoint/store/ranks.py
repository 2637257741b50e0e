"""A store's record of one rank: enrolment, newest snapshot, orders sent to it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store import door, shelf
from robust_slurm.checkpoint.store.disk.persist import Destination, Persister
from robust_slurm.checkpoint.store.door import Message, RankConnection, RefusedError
from robust_slurm.checkpoint.store.events import EnrolledEvent, SavedEvent, StoreEvent
from robust_slurm.checkpoint.store.shelf import ShelfRecord
from robust_slurm.checkpoint.transfer.pusher import Pusher
from robust_slurm.resizing.shares import MOST_LENGTHS

EVERY = 0.5  # s between two of a rank's SavedEvents
REPEATED = 8  # steps that are reported again, as a report may be lost on its way
SAME = 64  # steps in one of them at most, for comparison with those of other ranks
MAX_RANK = 1 << 24


class RankEnrolment(NamedTuple):
    said: EnrolledEvent
    """The event that tells robust-srun of it."""
    destination: Destination
    local: int
    """Number of the rank on its node."""


def read_enrolment(message: Message) -> RankEnrolment:
    """Read an enrolment. Raises RefusedError."""
    world = door.whole(message, "world", MAX_RANK)
    rank = door.whole(message, "rank", max(world, 1))
    mesh = message.get("mesh", {})
    needs = message.get("needs", [])
    if not isinstance(mesh, dict) or not all(type(v) is int and v > 0 for v in mesh.values()):
        raise RefusedError(f"enrol: mesh is {mesh!r}"[:200])
    if not isinstance(needs, list) or not all(type(v) is int and 0 <= v < world for v in needs):
        raise RefusedError(f"enrol: needs is {needs!r}"[:200])
    lengths = message.get("lengths", [])
    if (
        not isinstance(lengths, list)
        or len(lengths) > MOST_LENGTHS
        or not all(type(v) is int and 0 < v < 1 << 62 for v in lengths)
    ):
        raise RefusedError(f"enrol: lengths is {lengths!r}"[:200])
    said = EnrolledEvent(
        door.whole(message, "epoch"), rank, world, mesh, tuple(sorted({*needs, rank})),
        door.absolute(message, "directory"),
        door.whole(message, "every") if "every" in message else 0,
        door.whole(message, "bytes") if "bytes" in message else 0,
        door.text(message, "fixed", 1024),
        tuple(lengths),
        door.whole(message, "shards", MAX_RANK) if "shards" in message else 0,
        door.whole(message, "stages", MAX_RANK) if "stages" in message else 0,
    )  # fmt: skip
    keep = max(1, door.whole(message, "keep")) if "keep" in message else 2
    return RankEnrolment(
        said,
        Destination(said.directory, keep, door.absolute(message, "python")),
        door.whole(message, "local") if "local" in message else 0,
    )


class Latest(NamedTuple):
    """The newest complete snapshot of a rank."""

    step: int
    slot: int
    path: Path
    record: ShelfRecord | None
    """None for one outside the store's directory."""


class StoreRank:
    """State of one rank in this store; lives until the store ends."""

    def __init__(
        self,
        number: int,
        emit: Callable[[StoreEvent], None],
        due: Callable[[], None],
        make_pusher: Callable[[StoreRank], Pusher],
        make_persister: Callable[[StoreRank], Persister],
        has: Callable[[int], bool],
    ) -> None:
        """``has(step)``: this rank's snapshot of the step is whole in memory."""
        self.number = number
        self._emit = emit
        self._due = due
        self._has = has
        self.lock = threading.RLock()
        self.enrolment: RankEnrolment | None = None
        self.connection: RankConnection | None = None
        self.enrolled = -1
        """The epoch in which it enrolled last."""
        self.line = 0
        """See ``Snapshot.line``."""
        self.newest = -1
        """Newest step it has saved in this epoch."""
        self.latest: Latest | None = None
        self.digesting = threading.Lock()
        self._told_held: set[int] = set()
        self._replicated: int | None = None
        self._safe = -1
        self._skipped = -1
        self._saved: SavedEvent | None = None
        self._unsaid = False
        self._same: deque[tuple[int, int]] = deque(maxlen=SAME)
        self._have: deque[int] = deque(maxlen=SAME)  # not yet reported, or repeated
        self._next_event = 0.0
        self.pusher = make_pusher(self)
        self.persister = make_persister(self)

    def enrol(self, enrolment: RankEnrolment, connection: RankConnection) -> None:
        with self.lock:
            older, self.connection = self.connection, connection
            self.enrolment = enrolment
            self.enrolled = enrolment.said.epoch
            self._told_held = set()
        if older is not None and older is not connection:
            older.close()

    def begin(self, epoch: int, *, anew: bool = False) -> None:
        with self.lock:
            self.connection = None
            self.newest = -1
            self.latest = None
            self._replicated, self._safe, self._skipped = None, -1, -1
            self._saved = None
            self._same.clear()
            self._have.clear()
        self.pusher.begin(epoch, anew=anew)

    def restart(self, epoch: int, *, anew: bool) -> None:
        """Enrol again within the epoch. ``anew``: the rank begins anew, maybe at an earlier step
        than it had come to."""
        with self.lock:
            older = self.connection
        self.begin(epoch, anew=anew)
        if older is not None:
            older.close()

    def left(self, connection: RankConnection) -> None:
        with self.lock:
            if self.connection is connection:
                self.connection = None

    def tell(self, message: Message) -> None:
        with self.lock:
            connection = self.connection
        if connection is not None:
            connection.send(message)

    def answer(self, op: str, step: int) -> None:
        """Note that a step is ``replicated`` or ``alone`` (``op``), and send that to the rank."""
        with self.lock:
            if op == "replicated":
                self._replicated = max(self._replicated or 0, step)
            if self._safe < step <= self.newest:
                self._safe = step
                if self._has(step):
                    self._have.append(step)
            self._changed()
        self._report_soon()
        self.tell({"op": op, "step": step})

    def skipped(self, step: int) -> None:
        """Note that the rank leaves this step out: nobody needs to wait until it has it."""
        with self.lock:
            self._skipped = max(self._skipped, step)
            self._changed()
        self._report_soon()

    def _changed(self) -> None:
        if self._safe >= self.newest:  # else one before it is still on its way
            self._safe = max(self._safe, self._skipped)
        if self._saved is not None:
            self._saved = self._saved._replace(
                replicated=self._replicated, safe=self._safe, have=tuple(self._have)
            )
            self._unsaid = True

    @property
    def held(self) -> set[int]:
        return self.persister.held | self.pusher.held

    def held_changed(self) -> None:
        """Send the rank the held slots, if they have changed."""
        with self.lock:  # the rank must receive the sets in the order in which they were true
            held = self.held
            if held == self._told_held or self.connection is None:
                return
            self._told_held = held
            self.tell({"op": "held", "slots": sorted(held)})

    def kept(self, step: int) -> None:
        with self.lock:
            self._told_held = self.held
            self.tell({"op": "kept", "step": step, "held": sorted(self._told_held)})

    def saved(
        self, step: int, size: int, copy_s: float, cost: Cost, epoch: int, same: int = -1
    ) -> None:
        blocked_s = cost.blocked_s + cost.waited_s
        with self.lock:
            if same >= 0:
                self._same.append((step, same))
            self._saved = SavedEvent(
                epoch, self.number, step, self._replicated, size, copy_s, blocked_s,
                tuple(self._same), cost, self._safe, tuple(self._have),
            )  # fmt: skip
            self._unsaid = True
        self._report_soon()

    def _report_soon(self) -> None:
        if self.report():
            self._due()

    def report(self) -> float:
        """Emit the newest SavedEvent if it is time. Returns the s until one is due, or 0."""
        with self.lock:
            event = self._saved
            if event is None or not self._unsaid:
                return 0.0
            wait = self._next_event - time.monotonic()
            if wait > 0:
                return wait
            self._unsaid = False
            self._same.clear()
            while len(self._have) > REPEATED:
                self._have.popleft()
            self._saved = event._replace(same=(), have=())
            self._next_event = time.monotonic() + EVERY
        self._emit(event._replace(have=tuple(step for step in event.have if self._has(step))))
        return 0.0


def took_a_place(enrolment: RankEnrolment, ranks: Iterable[StoreRank]) -> bool:
    """True if a rank of another number ran in this rank's place before, in this epoch: a launcher
    that starts ranks anew may number them otherwise. ``ranks``: those of the store."""
    return any(
        rank.number != enrolment.said.rank
        and rank.enrolled == enrolment.said.epoch
        and rank.connection is None
        and rank.enrolment is not None
        and rank.enrolment.local == enrolment.local
        for rank in ranks
    )


def snapshot_path(
    message: Message, enrolment: RankEnrolment, directory: Path
) -> tuple[Path, int, bool]:
    """Path, slot and whether it lies in the store's directory. Raises RefusedError."""
    name = door.text(message, "file")
    folder, _, base = name.rpartition("/")
    try:
        kind, owner, slot = shelf.parse_name(base)
    except ValueError as err:
        raise RefusedError(f"{message['op']}: {err}") from None
    if kind != shelf.OWN or owner != enrolment.said.rank:
        raise RefusedError(f"{message['op']}: {name!r} is no file of rank {enrolment.said.rank}")
    if not folder:
        return directory / base, slot, True
    durable = enrolment.destination.directory
    inside = durable and (folder + "/").startswith(f"{durable}/.staging/")
    if not inside or ".." in folder.split("/"):
        raise RefusedError(f"{message['op']}: {name!r} is in no directory that this rank enrolled")
    return Path(folder) / base, slot, False
