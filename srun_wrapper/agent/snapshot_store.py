"""The slot's store of snapshots, as the shim sees it: orders in, messages out.

What may take long (checking, fetching, writing) runs in threads; the shim's loop never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from robust_slurm.checkpoint.store.events import StoreEvent
from robust_slurm.checkpoint.store.store import Store
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol import checkpoint_messages
from srun_wrapper.protocol.checkpoint_messages import (
    Alarm,
    Complete,
    Fetch,
    Flush,
    MakeRoom,
    Moved,
    PersistAt,
    ReplicaTargets,
    SaveEvery,
    StandAt,
    Stock,
    TakeStock,
    Unshare,
)
from srun_wrapper.protocol.messages import Message, Start
from srun_wrapper.protocol.task_options import TaskOptions

T = TypeVar("T")

ANSWERS = 16  # the newest, kept for a supervisor that asks again
DIRECTORY = "ckpt"  # in the agent's run directory
SOCKET = "ROBUST_CKPT_SOCKET"


class SnapshotStore:
    """One slot's store. Raises OSError when it cannot be made."""

    def __init__(
        self,
        loop: Loop,
        local: int,
        run_dir: Path,
        key: bytes,
        emit: Callable[[Message], None],
        options: TaskOptions,
    ) -> None:
        self._loop = loop
        self._local = local
        self._emit = emit
        self._answers: dict[int, Message | None] = {}  # by token; None: not known yet
        directory = run_dir / DIRECTORY
        directory.mkdir(mode=0o700, exist_ok=True)
        self._store = Store(
            directory,
            name=str(local),
            key=key,
            emit=lambda event: loop.call(lambda: self._event(event)),
            bandwidth=options.checkpoint_bandwidth,
        )

    @property
    def port(self) -> int:
        """Port on which peers reach this store."""
        return self._store.port

    def env(self) -> dict[str, str]:
        """Variables with which the rank finds the store."""
        return {SOCKET: str(self._store.socket_path)}

    def begin(self, order: Start) -> None:
        """Begin an epoch, which is about to be launched in this slot.

        A replay is ignored: it neither saves nor restores, and the snapshots stay for afterwards.
        """
        if "ROBUST_REPLAY" in order.env:
            return
        self._store.begin(order.epoch, order.restore)

    def processes(self) -> list[int]:
        """Pids of the store's own children, which do not end with the rank."""
        return self._store.children()

    def close(self) -> None:
        self._store.close()

    # -- orders

    def handle(self, order: Message) -> None:
        """Carry an order out, if it is one for this store."""
        kept, local = self._store, self._local
        if isinstance(order, ReplicaTargets):
            kept.place(order.targets)
        elif isinstance(order, MakeRoom):
            kept.room.prepare(order.size, order.files)
        elif isinstance(order, PersistAt):
            kept.persist_at(order.step)
        elif isinstance(order, Unshare):
            kept.orders.unshare(order.ranks)
        elif isinstance(order, Complete):
            kept.complete(order.step, order.passed)
        elif isinstance(order, SaveEvery):
            kept.orders.save_every(order.every, order.first)
        elif isinstance(order, StandAt):
            kept.orders.stand_at(order.step)
        elif isinstance(order, TakeStock):
            step = order.step
            self._answer(
                order.token,
                lambda: kept.stock(step, read=step is not None),
                partial(Stock, order.token, local),
            )
        elif isinstance(order, Fetch) and order.local == local:
            moved = partial(Moved, order.token, local)
            self._answer(order.token, lambda: kept.fetch(order.items), moved)
        elif isinstance(order, Flush) and order.local == local:
            self._answer(
                order.token,
                lambda: kept.flush(order.owners, order.step, order.commit_world, order.deadline),
                partial(Moved, order.token, local),
            )

    def _answer(
        self,
        token: int,
        work: Callable[[], Iterable[T]],
        said: Callable[[tuple[T, ...]], Message],
    ) -> None:
        """Work in a thread and send the results; if it fails, an alarm and an empty answer.

        A request that is repeated on a new connection is not carried out again: its answer, which
        may have been lost with the old connection, is sent again.
        """
        if token in self._answers:
            if (known := self._answers[token]) is not None:
                self._emit(known)
            return
        self._answers[token] = None
        while len(self._answers) > ANSWERS:
            del self._answers[next(iter(self._answers))]

        def answered(message: Message) -> None:
            if token in self._answers:
                self._answers[token] = message
            self._emit(message)

        def failed(err: Exception) -> None:
            text = f"internal error in the store: {type(err).__name__}: {err}"
            self._loop.call(lambda: self._emit(Alarm(0, -1, text)))

        def run() -> None:
            answer: tuple[T, ...] = ()
            try:
                answer = tuple(work())
            except Exception as err:  # noqa: BLE001 - the supervisor waits for an answer
                failed(err)
            self._loop.call(lambda: answered(said(answer)))

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError as err:  # the user or the node has as many threads as are allowed
            failed(err)
            answered(said(()))

    # -- events

    def _event(self, event: StoreEvent) -> None:
        self._emit(message_of(event, self._local))


def message_of(event: StoreEvent, local: int) -> Message:
    """Return the message of an event: its fields, with a number and the slot added."""
    tag = type(event).__name__.removesuffix("Event")
    kind: type[Message] = getattr(checkpoint_messages, tag)
    given = {"number": 0, "local": local, **event._asdict()}
    return kind(**{name: given[name] for name in kind.__struct_fields__})
