"""Schedule writes to the durable tier, in one lane for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from robust_slurm import commands
from robust_slurm.checkpoint.store.disk.persist import (
    COMMIT_WAIT,
    Destination,
    Persister,
    PersistJob,
)
from robust_slurm.checkpoint.store.door import RankConnection
from robust_slurm.checkpoint.store.events import FetchOutcome, PersistedEvent, StoreEvent
from robust_slurm.checkpoint.store.ranks import Latest, StoreRank
from robust_slurm.checkpoint.store.shelf import OWN, Shelf

ALL_HERE = 15.0  # s: if all ranks had enrolled, the supervisor would have placed them by now


class StoreSettings(NamedTuple):
    """Settings of the Store."""

    key: bytes | None
    bandwidth: float
    patience: float
    write_deadline: float


def writer_command(python: str) -> list[str]:
    return [python, *commands.words("robust_slurm.checkpoint.durable.writer")]


class Archive:
    """Schedules the writes of one store. ``ranks()``: the store's ranks; ``all_here()``: True once
    all ranks of the job have enrolled."""

    def __init__(
        self,
        shelf: Shelf,
        settings: StoreSettings,
        emit: Callable[[StoreEvent], None],
        ranks: Callable[[], list[StoreRank]],
        all_here: Callable[[], bool],
    ) -> None:
        self._shelf = shelf
        self._settings = settings
        self._emit = emit
        self._ranks = ranks
        self._all_here = all_here
        self._lock = threading.Lock()
        self._lanes: dict[int, Persister] = {}  # of owners that are no ranks of this store

    def persisters(self) -> list[Persister]:
        with self._lock:
            lanes = list(self._lanes.values())
        return [*(rank.persister for rank in self._ranks()), *lanes]

    def make(self, changed: Callable[[], None]) -> Persister:
        return Persister(self._emit, self._settings.write_deadline, changed, writer_command)

    def warm(self, rank: StoreRank) -> None:
        """Start the rank's writer beside the training: importing torch takes seconds."""
        enrolment = rank.enrolment
        if enrolment is not None and enrolment.destination.directory:
            rank.persister.warm(enrolment.destination)

    def persist(self, rank: StoreRank, latest: Latest) -> None:
        """Write this snapshot, unless an older one of the rank is still being written."""
        enrolment = rank.enrolment
        assert enrolment is not None
        if not enrolment.destination.directory:
            return
        under_way = rank.persister.steps
        if latest.step in under_way:
            return
        if under_way:
            why = "passed over: an older step of this rank is still being written"
            self._emit(PersistedEvent(rank.number, latest.step, False, why, 0.0))
            return
        self._add(rank, latest, lambda _outcome: None)

    def _add(
        self,
        rank: StoreRank,
        latest: Latest,
        finished: Callable[[FetchOutcome], None],
    ) -> None:
        enrolment = rank.enrolment
        assert enrolment is not None
        rank.persister.add(
            PersistJob(
                latest.path, rank.number, latest.step, latest.slot, latest.record,
                enrolment.destination, enrolment.said.world if rank.number == 0 else 0,
                COMMIT_WAIT, finished,
            )
        )  # fmt: skip

    def give_up(self, rank: StoreRank) -> None:
        """Stop writing what the rank gave up as it began anew."""
        with self._lock:
            lanes = [rank.persister, *self._lanes.values()]
        for persister in lanes:
            persister.forget("its rank began anew")

    def flush_rank(self, rank: StoreRank, connection: RankConnection) -> None:
        """Write the newest snapshot, wait, and tell the rank; in a thread of its own."""
        latest, enrolment = rank.latest, rank.enrolment
        done = threading.Event()
        result: list[FetchOutcome] = []

        def flushed(ok: bool, why: str) -> None:
            step = latest.step if latest is not None else -1
            connection.send({"op": "flushed", "step": step, "ok": ok, "why": why})

        def finished(outcome: FetchOutcome) -> None:
            result.append(outcome)
            done.set()

        if latest is None or enrolment is None:
            flushed(True, "nothing was saved")
            return
        if not enrolment.destination.directory:
            flushed(False, "there is no directory for durable checkpoints")
            return
        self._add(rank, latest, finished)
        rank.held_changed()
        if not done.wait(ALL_HERE) and rank.number == 0 and not self._all_here():
            flushed(False, "not all ranks of the training have made a Checkpointer")
        elif done.wait(3 * self._settings.write_deadline):
            flushed(result[0].ok, result[0].why)
        else:
            flushed(False, "the writer takes too long")

    def flush_one(
        self,
        owner: int,
        file: str,
        step: int,
        commit_world: int,
        commit_wait: float,
        finished: Callable[[FetchOutcome], None],
    ) -> str:
        """Queue one holding. Returns why that cannot be; empty when it is queued."""
        record = self._shelf.get(file)
        if record is None or (record.owner, record.step) != (owner, step):
            return f"{file} of step {step} of rank {owner} is not here"
        destination = Destination("", 0, "")
        lane: Persister | None = None
        for rank in self._ranks():
            if rank.number == owner:
                lane = rank.persister
            if rank.enrolment is not None and (not destination.directory or rank.number == owner):
                destination = rank.enrolment.destination
        if not destination.directory:
            return "no rank of this store has named a durable directory"
        if lane is None:
            with self._lock:
                lane = self._lanes.get(owner)
                if lane is None:
                    lane = self._lanes[owner] = self.make(lambda: None)
        path = self._shelf.directory / file
        slot = record.slot if record.kind == OWN else -1
        lane.add(
            PersistJob(
                path, owner, step, slot, record, destination, commit_world, commit_wait,
                finished,
            )
        )  # fmt: skip
        return ""
