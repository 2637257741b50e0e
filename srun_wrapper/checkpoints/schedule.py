"""Decide which steps are saved and written to disk, and which ones stores may free."""

from __future__ import annotations

import math

from robust_slurm.checkpoint.planning.interval import Interval
from srun_wrapper.checkpoints.durable_steps import DurableSteps
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.checkpoints.watermark import Watermark
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import Complete, PersistAt, Saved, SaveEvery

AHEAD = 2.0  # s between ordering a durable checkpoint and its step; at least 4 intervals
SIGNALS = 60.0  # s between two durable checkpoints that signals to the ranks bring forward
TELL = 0.5  # s between two messages to all stores of what all ranks have


class Schedule:
    """Sends all stores the orders of which steps to save, write and free."""

    def __init__(self, state: JobState, enrolments: Enrolments, journal: Journal) -> None:
        self._state = state
        self._enrolments = enrolments
        self._journal = journal
        self.durable = DurableSteps(60 * state.config.checkpoint_minutes or math.inf)
        self.interval = Interval(state.config.checkpoint_overhead / 100)
        self._everywhere = Watermark()
        self._hurried = -math.inf  # the time of the last signal that brought one forward
        self._told_at = -math.inf  # when the stores were last sent what all ranks have

    def begin(self, *, restored: bool) -> None:
        """Begin an epoch; ``restored``: from memory, which another fault may take."""
        self.interval.begin()
        self._everywhere = Watermark()
        self.durable.begin(at_once=restored)

    def enrolled(self, rank: int, every: int) -> None:
        """Note a rank; ``every``: the steps between durable ones that its Checkpointer asks for."""
        self._everywhere.began(rank)
        if rank == 0:
            self.durable.every = every

    def saved(self, message: Saved) -> None:
        self._everywhere.add(message.rank, message.safe, message.have)
        self.interval.hear(message.rank, message.step, message.cost)

    def look(self, now: float) -> None:
        self._order_durable(now)
        self._order_interval(now)
        self._free(now)

    @property
    def upcoming(self) -> int:
        """The newest step that some rank may have saved: two are ``interval.every`` apart."""
        return self._enrolments.newest + self.interval.every - 1

    def ahead(self) -> int:
        """Steps until all ranks have received an order."""
        timed = self._state.pace.step_time()
        seconds = max(AHEAD, 4 * self._state.interval)
        return math.ceil(seconds / (timed or 1.0)) + 1

    def unwritten(self, before: int) -> bool:
        """True if a step older than ``before`` is on its way to disk, and lost by a restart."""
        return bool(self._enrolments.directory) and self.durable.is_open(before)

    def _order_durable(self, now: float) -> None:
        if self._state.passed_at > self._hurried + SIGNALS:
            # Slurm warns of a time limit or a preemption like that, and leaves little time after.
            self._hurried = self._state.passed_at
            self.durable.hurry(now)
        timed = self._state.pace.step_time() is not None
        step = self.durable.next(now, self.upcoming, self.ahead(), timed=timed)
        if step is not None:
            self._state.bus.broadcast(PersistAt(step))

    def _order_interval(self, now: float) -> None:
        """Have fewer or more steps saved, if saving costs more or less than it may."""
        if self.interval.adjust(now, self.upcoming + self.ahead()):
            self._state.bus.broadcast(SaveEvery(self.interval.every, self.interval.first))
            text = f"checkpoints: in memory {self.interval.text()}"
            say(text)
            self._journal.event("checkpoint_every", every=self.interval.every, text=text)

    def _free(self, now: float) -> None:
        """Send all stores the newest step that all ranks have: older ones free their memory."""
        if now - self._told_at >= TELL and self._everywhere.advance(self._enrolments.world):
            self._told_at = now
            self._state.bus.broadcast(Complete(self._everywhere.step, self._everywhere.passed))
