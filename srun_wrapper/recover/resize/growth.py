"""Grow back at a step boundary: all ranks stand after one step, and a larger world resumes from it.

Where no snapshots are taken the world grows at the next recovery only.
"""

from __future__ import annotations

from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.resize.resizing import Resizing
from srun_wrapper.recover.resize.standing import NOWHERE, Standing

AGAIN = 10.0  # s until ranks are asked to stand again after some went past the step


class Growth:
    """Watches for nodes that could take places again, and has the ranks stand for them."""

    def __init__(self, state: JobState, resizing: Resizing, standing: Standing) -> None:
        self._state = state
        self._resizing = resizing
        self._standing = standing
        self._next = 0.0
        self._told = False
        self.due = False
        """The ranks stand, and nodes are there: the world can grow."""

    @property
    def held_up(self) -> bool:
        """True if ranks stand and wait for others or for us: no step comes, and that is no hang."""
        return self._standing.since is not None

    def look(self, now: float) -> None:
        """Have the ranks stand once nodes are there; called while they run."""
        state, standing = self._state, self._standing
        if not state.config.min_nodes:
            return
        self._resizing.note_steps()
        if not self._told and self._known():
            self._told = True
            if why := self._resizing.unfit():
                say(f"min_nodes: this job cannot go on with fewer nodes: {why}")
        if self.due:
            return
        standing.release_stragglers(now)
        if not self._resizing.prepared(now) or state.world.is_ending() or state.signalled:
            if standing.step != NOWHERE:
                standing.release(now)
        elif standing.step != NOWHERE:
            where = standing.where(now)
            if where == "all":
                self.due = True
                state.changed.set()
            elif where == "over":
                standing.release(now)
                self._next = now + AGAIN
        elif (
            standing.all_saved
            and standing.world
            and now >= self._next
            and state.pace.step_time() is not None
            and not state.stopped()
        ):
            standing.order()

    def _known(self) -> bool:
        """True if it is known which ranks have a Checkpointer: they enrol before their steps."""
        if self._standing.world:
            return self._standing.all_saved
        return self._state.progress.beats > 0 and self._state.world.all_stepped()

    def begin(self) -> None:
        """Forget what the ranks of the last epoch were asked, as another one begins."""
        self.due = False
        self._standing.forget()
