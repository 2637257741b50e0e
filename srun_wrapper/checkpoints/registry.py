"""Receive what stores report, and keep the parts that act on it up to date."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from robust_slurm.checkpoint.format.sizes import exceeds, megabytes
from srun_wrapper.checkpoints.alarms import Alarms, Notices, kind
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.enrolments import Enrolment, Enrolments, StoreAt
from srun_wrapper.checkpoints.replicas import Replicas
from srun_wrapper.checkpoints.schedule import Schedule
from srun_wrapper.checkpoints.shared_states import SharedStates
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import (
    Alarm,
    Committed,
    Enrolled,
    Persisted,
    Resumed,
    Saved,
    StoreReady,
)
from srun_wrapper.protocol.messages import Message

PARTIAL = 30.0  # s for the other ranks to enrol when one has saved a step


class Checkpoints:
    """The job's checkpoints. ``heard`` receives all messages of the stores that are no replies."""

    def __init__(
        self,
        state: JobState,
        journal: Journal,
        leaves: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        """``leaves``: see Replicas."""
        self._state = state
        self._journal = journal
        # ``say`` as it is then: tests put another in place.
        self._notices = Notices(lambda text: say(text))
        self._alarms = Alarms(lambda text: say(text))
        self.enrolments = Enrolments(state.config.checkpoint_dir)
        self.certificates = Certificates(state, self.enrolments, journal)
        self.schedule = Schedule(state, self.enrolments, journal)
        self.replicas = Replicas(state, self.enrolments, journal, leaves)
        self.shared = SharedStates(
            state, self.enrolments, self.certificates, self.schedule, journal, self._notices
        )
        self.on_enrolled: Callable[[StoreAt, Enrolled], None] = lambda _at, _said: None
        self.durable_step: int | None = None
        self.resumed_in = 0
        """Newest epoch of which a rank reported what it resumed from."""
        self._saving_since = 0.0  # in this epoch

    def new_epoch(self, step: int, *, from_memory: bool) -> None:
        """Begin an epoch that resumes at ``step``; 0: from nothing, or from an unknown step."""
        self.enrolments.begin()
        self.schedule.begin(restored=from_memory)
        self.certificates.begin(self._state.world.epoch, step)
        self.shared.begin(step, from_memory=from_memory)
        self._saving_since = 0.0

    # -- messages

    def heard(self, node: Node, message: Message) -> None:
        """Receive a message of a store."""
        try:
            self._heard(node, message)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            self._notices.once(f"checkpoints: internal error: {type(err).__name__}: {err}")

    def _heard(self, node: Node, message: Message) -> None:
        epoch = self._state.world.epoch
        if isinstance(message, StoreReady):
            node.stores[message.local] = message.port
            node.store_host = message.host
        elif isinstance(message, Enrolled):
            if message.epoch == epoch:
                self._enrolled(node, message)
        elif isinstance(message, Saved):
            if message.epoch == epoch:
                self._saved(message)
        elif isinstance(message, Persisted):
            self.schedule.durable.written(message.step, self.enrolments.world)
            if message.ok:
                self.enrolments.written[message.rank, node.name] = message.step
            else:
                text = f"step {message.step} not on disk: {message.why}"
                self._alarm(node, message.rank, text, kind(message.why))
        elif isinstance(message, Committed):
            self.schedule.durable.over(message.step)
            self._committed(message)
        elif isinstance(message, Alarm):
            self._alarm(node, message.rank, message.text)
        elif isinstance(message, Resumed) and message.epoch == epoch:
            self.schedule.durable.resumed(message.step)
            if message.epoch != self.resumed_in:
                self.resumed_in = message.epoch
                self.certificates.resumed(message.step)
                self._journal.event("resumed", rank=message.rank, step=message.step)

    def _enrolled(self, node: Node, message: Enrolled) -> None:
        place = self._state.world.place_of(node)
        if place is None:
            return
        at = StoreAt(node, message.local)
        if message.rank in self.enrolments.here:
            self.shared.anew()
        self.enrolments.enrol(message.rank, Enrolment(message.epoch, place, at, message))
        self.on_enrolled(at, message)
        self.schedule.enrolled(message.rank, message.every)
        self.replicas.place_all()

    def _saved(self, message: Saved) -> None:
        self.enrolments.save(message)
        self.schedule.saved(message)
        self.replicas.heard(message)
        progress = self._state.progress
        progress.saved = max(progress.saved or 0, message.step)
        self._look_at_size(message)
        self.shared.compare(message)

    def _committed(self, message: Committed) -> None:
        self._journal.event("durable", step=message.step, ok=message.ok, why=message.why)
        if message.ok:
            self.durable_step = max(message.step, self.durable_step or 0)
            self.certificates.durable(message.step)
            self.shared.committed(message.step)
            self._journal.news(f"checkpoint of step {message.step} is on disk")
        elif message.step > (self.durable_step or 0):
            self._say_missing()
            text = f"no durable checkpoint of step {message.step}: {message.why}"
            self._notices.once(text, kind(message.why))

    def _alarm(self, node: Node, rank: int, text: str, key: str = "") -> None:
        """Report an alarm once. ``key``: equal for the same trouble; default: the kind of text."""
        whose = f"rank {rank} on {node.name}" if rank >= 0 else node.name
        line = f"checkpoints, {whose}: {text}"
        if self._alarms.add(time.monotonic(), rank, text, line, key):
            self._journal.event("checkpoint_alarm", node=node.name, rank=rank, text=text)

    # -- from time to time

    def look(self, now: float) -> None:
        """Send the orders that are due while the ranks run."""
        self._alarms.look(now)
        if self.enrolments.saved:
            self.replicas.make_room()
            self.replicas.look(now)
            self.schedule.look(now)
            self.shared.look(now)
            self._saving_since = self._saving_since or now
            if now - self._saving_since > PARTIAL:
                self._say_missing()

    def _say_missing(self) -> None:
        """Report ranks without a Checkpointer: the script looks as if it saved, and does not."""
        missing = self.enrolments.missing()
        if not missing:
            return
        who = ", ".join(map(str, missing[:8])) + (", …" if missing[8:] else "")
        has = f"ranks {who} have" if missing[1:] else f"rank {who} has"
        self._notices.once(
            f"checkpoints: {has} no Checkpointer: nothing can be resumed. Create one in every "
            f"rank and call resume()",
            "no Checkpointer",
        )

    def _look_at_size(self, saved: Saved) -> None:
        """Report a snapshot larger than enrolled: only models and optimizers were known then."""
        said = self.enrolments.ranks[saved.rank].said.size
        if exceeds(saved.size, said):
            self._notices.once(
                f"checkpoints: a snapshot takes {megabytes(saved.size)} a rank, not "
                f"{megabytes(said)}: loader and extra hold the rest",
                "size",
            )

    # -- for robust-status

    def record(self) -> dict[str, Any] | None:
        """Return the roster's entry on checkpoints; None when no rank uses any."""
        if not self.enrolments.ranks:
            return None
        saved, interval = self.enrolments.saved.values(), self.schedule.interval
        copies = [s.replicated for s in saved if s.replicated is not None]
        return {
            "step": min((s.step for s in saved), default=None),
            "replicated": min(copies, default=None) if len(copies) == len(saved) else None,
            "durable": self.durable_step,
            "certified": self.certificates.newest,
            "every": interval.every,
            "why_every": interval.text() if interval.every > 1 else "",
            "survives": self.replicas.survives,
            "directory": self.enrolments.directory,
            "bytes": self.enrolments.largest,
            "blocked_s": max((s.blocked_s for s in saved), default=0.0),
        }
