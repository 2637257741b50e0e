"""Check a step every so many steps: other nodes compute it again, and the results must be equal.

The ranks stand after a step; robust-srun reads the checksums of all their state, starts them on
other nodes from the step before, and compares what they hold when they stand there again. Where
that agrees training goes on from there. What follows if not: ``rules``; why so:
docs/decisions/0035-certified-steps.md.
"""

from __future__ import annotations

import time

from robust_slurm.checkpoint.format.state_sum import PHASE
from srun_wrapper.checkpoints.verify.check import Outcome, StateCheck
from srun_wrapper.checkpoints.verify.recomputing import Recomputing
from srun_wrapper.checkpoints.verify.standing import NOWHERE, Standing
from srun_wrapper.command.input_rules import SPENT
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState


class Verify:
    """Asks for checks while the ranks run, and carries one out while they stand."""

    def __init__(
        self,
        state: JobState,
        standing: Standing,
        recomputing: Recomputing,
        check: StateCheck,
        journal: Journal,
        phase: Phase,
    ) -> None:
        self._state = state
        self._standing = standing
        self._recomputing = recomputing
        self._check = check
        self._journal = journal
        self._phase = phase
        self._wanted = self._every = state.config.verify_every
        self._running = False
        self._agreed = 0
        self.ready = False
        """All ranks stand, and ``run`` is due."""
        self.seconds = 0.0
        self.text = ""
        """For robust-status."""

    @property
    def held_up(self) -> bool:
        """True if ranks stand and wait for others or for us: no step comes, and that is no hang.

        It ends: by itself, where some do not come (``standing``), or with the check.
        """
        return self._standing.since is not None

    # -- while the ranks run

    def begin(self) -> None:
        """Forget what the ranks of the last epoch were asked, as another one begins."""
        if not self._running:
            self._standing.forget()
            self.ready = False

    def look(self, now: float) -> None:
        """Ask the ranks to stand; see whether they do, and that none does afterwards."""
        state, standing = self._state, self._standing
        if not self._wanted or self._running:
            return
        if state.signalled and standing.step != NOWHERE:
            self._go_on()  # ranks that stand could not react to the signal
        standing.release_stragglers(now)
        if state.signalled or state.failures or state.stopped():
            return
        if not self._every or self.ready or self._phase.name != "running":
            return
        if standing.step == NOWHERE:
            self._ask()
            return
        where = standing.where(now)
        if where == "wait" and self.held_up and state.world.is_ending():
            where = "over"
        if where == "all" and standing.unwritten:
            # The step itself is written by the ranks that compute it again.
            self._pass_over("an older step is not on disk yet")
            self._go_on(now)
        elif where == "all":
            self.ready = True
            state.changed.set()
        elif where == "over":
            self._pass_over("not all ranks reached it in time")
            self._go_on(now)

    def _ask(self) -> None:
        state = self._state
        if not self._standing.world:
            done = state.progress.best or state.progress.beats
            if done >= self._every and state.world.all_stepped():
                self._stop("the script has no Checkpointer: there is no state to compare")
            return
        if not self._standing.all_saved or state.nonfinite.since or state.pace.phase == PHASE:
            return  # some ranks still stand since the last check
        if self._recomputing.spent():
            self._stop(SPENT)
            return
        if state.world.is_ending():
            return
        self._standing.order(self._every)

    def _pass_over(self, why: str) -> None:
        self._journal.news(f"step {self._standing.step} is not checked: {why}")

    def _go_on(self, now: float | None = None) -> None:
        self.ready = False
        self._standing.release(now)

    def _stop(self, why: str) -> None:
        """Check no more steps in this job."""
        self._every = 0
        say(f"--robust-verify-every: off for the rest of the job: {why}")
        self.text = f"off: {why}"

    # -- while they stand

    async def run(self) -> None:
        """Carry out one check. Afterwards the ranks run, or a failure waits for its recovery."""
        step = self._standing.step
        began = self._standing.since or time.monotonic()
        self._recomputing.begin(began)
        self._running, self.ready, self._phase.name = True, False, "checking"
        outcome: Outcome = "unknown"
        try:
            outcome = await self._check.run(step)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            self._stop(f"internal error: {type(err).__name__}: {err}")
        finally:
            self._running = False
        if self._check.off and self._every:
            self._stop(self._check.off)
        if not self._recomputing.interrupted():
            await self._recomputing.resume(f"after the check of step {step}")
            self._phase.name = "running"
        self._go_on()  # also if a signal or a failure came: nothing else releases the ranks
        self._account(step, outcome, time.monotonic() - began)

    def _account(self, step: int, outcome: Outcome, seconds: float) -> None:
        self.seconds += seconds
        nodes = [node.name for node in self._state.world.places]
        self._journal.event(
            "check", step=step, outcome=outcome, seconds=round(seconds, 3), nodes=nodes
        )
        if outcome == "agree":
            self._agreed += 1
            self._journal.news(f"step {step} has the same result on other nodes ({seconds:.1f} s)")
        if self._every:
            newest = f", newest step {step}" if outcome == "agree" else f"; step {step}: {outcome}"
            times = "step" if self._agreed == 1 else "steps"
            self.text = (
                f"{self._agreed} {times} the same result on other nodes{newest}; "
                f"{self.seconds:.1f} s in all"
            )
