"""Have all ranks stand after one step, so that a larger world can resume from it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal

from robust_slurm.checkpoint.standing import PHASE
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.checkpoints.schedule import Schedule
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import StandAt

LIMIT = 60.0  # s for the slowest rank to come to a step at which others stand already
STEPS = 10  # or so many steps, where these take longer
AGAIN = 1.0  # s between two orders to go on: a node that is connecting anew gets only a later one
NOWHERE = -1
Where = Literal["wait", "all", "over"]


class Standing:
    """Orders ranks to stand and to go on, and watches them."""

    def __init__(self, state: JobState, enrolments: Enrolments, schedule: Schedule) -> None:
        self._state = state
        self._enrolments = enrolments
        self._schedule = schedule
        self.step = NOWHERE
        """Step after which the ranks are to stand."""
        self.since: float | None = None
        """Time when the first rank waited there."""
        self._released = -math.inf  # when the ranks were last ordered to go on

    @property
    def world(self) -> int:
        """Number of ranks of the training; 0 while none has reported it."""
        return self._enrolments.world

    @property
    def all_saved(self) -> bool:
        """True if every rank has saved a step in this epoch."""
        return len(self._enrolments.saved) >= self._enrolments.world

    def order(self) -> None:
        """Order the ranks to stand after the next step that all hear of in time."""
        newest = max(saved.step for saved in self._enrolments.saved.values())
        newest += self._schedule.interval.every - 1
        self.step = newest + self._schedule.ahead()
        self._state.bus.broadcast(StandAt(self.step))

    def release(self, now: float | None = None) -> None:
        """Order the ranks to go on."""
        self.forget()
        self._released = time.monotonic() if now is None else now
        self._state.bus.broadcast(StandAt(NOWHERE))

    def release_stragglers(self, now: float) -> None:
        """Order the ranks to go on once more, if some still stand."""
        stands = self._state.pace.phase == PHASE
        if self.step == NOWHERE and stands and now - self._released >= AGAIN:
            self.release(now)

    def forget(self) -> None:
        self.step, self.since = NOWHERE, None

    def where(self, now: float) -> Where:
        """Return whether all ranks stand, some are awaited, or some went past the step."""
        saved = {rank: each.step for rank, each in self._enrolments.saved.items()}
        pace = self._state.pace
        if self.since is None and (pace.phase == PHASE or self.step in saved.values()):
            self.since = now
        waited = 0.0 if self.since is None else now - self.since
        return standing(saved, self._enrolments.world, self.step, waited, pace.step_time())


def standing(
    saved: Mapping[int, int], world: int, step: int, waited: float, step_time: float | None
) -> Where:
    """Judge if all ranks stand at ``step``. ``saved``: the newest step of each; ``waited``: s since
    the first stood there."""
    if any(newest > step for newest in saved.values()):
        return "over"
    if len(saved) >= world > 0 and all(newest == step for newest in saved.values()):
        return "all"
    return "over" if waited > max(LIMIT, STEPS * (step_time or 0.0)) else "wait"
