"""Recomputed steps: every so many, other nodes compute one once more; it must come out alike.

The ranks stand after a step; robust-srun reads the checksums of all their state, starts them on
other nodes from the step before, and compares what they hold when they stand there again. Where
that agrees training goes on from there. What follows if not: ``rules``; why so:
docs/decisions/0035-certified-steps.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from robust_slurm.checkpoint.format.state_sum import PHASE
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.schedule import Schedule
from srun_wrapper.checkpoints.verify.machine_verdict import MachineVerdict
from srun_wrapper.checkpoints.verify.recomputing import Recomputing
from srun_wrapper.checkpoints.verify.rules import (
    MISSED,
    ONE_NODE,
    UNEVEN,
    UNPROVEN,
    Results,
    compare,
    conclude,
    next_step,
)
from srun_wrapper.checkpoints.verify.standing import NOWHERE, Standing
from srun_wrapper.command.input_rules import SPENT
from srun_wrapper.supervisor.journal import Journal
from srun_wrapper.supervisor.phase import Phase
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import Node
from srun_wrapper.supervisor.state import JobState

Outcome = Literal["agree", "program", "machine", "once", "proven", "unknown", "interrupted"]


class Verify:
    """Asks for checks while the ranks run, and carries one out while they stand."""

    def __init__(
        self,
        state: JobState,
        standing: Standing,
        schedule: Schedule,
        recomputing: Recomputing,
        verdict: MachineVerdict,
        certificates: Certificates,
        journal: Journal,
        phase: Phase,
    ) -> None:
        self._state = state
        self._standing = standing
        self._schedule = schedule
        self._recomputing = recomputing
        self._verdict = verdict
        self._certificates = certificates
        self._journal = journal
        self._phase = phase
        self._wanted = self._every = state.config.verify_every
        self._running = False
        self._missed = self._unproven = 0  # in a row
        self._agreed = 0
        self.ready = False
        """All ranks stand: ``run``."""
        self.seconds = 0.0
        self.text = ""
        """For robust-status."""

    @property
    def held_up(self) -> bool:
        """Ranks stand and wait for others or for us: no step comes, and that is no hang.

        It ends: by itself, where some do not come (``standing``), or with the check.
        """
        return self._standing.since is not None

    # -- while the ranks run

    def begin(self) -> None:
        """An epoch begins; what was asked of the last one's ranks is forgotten."""
        if not self._running:
            self._standing.forget()
            self.ready = False

    def look(self, now: float) -> None:
        """Ask the ranks to stand; see whether they do, and that none does afterwards."""
        state, standing = self._state, self._standing
        if not self._wanted or self._running:
            return
        if state.signalled and standing.step != NOWHERE:
            self._go_on()  # or they could do nothing about it
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
        if where == "all" and self._schedule.unwritten(standing.step):
            # The step itself is written by the ranks that compute it again.
            self._pass_over("an older one is not on disk yet")
            self._go_on(now)
        elif where == "all":
            self.ready = True
            state.changed.set()
        elif where == "over":
            self._pass_over("not all ranks stood there in time")
            self._go_on(now)

    def _ask(self) -> None:
        state = self._state
        if not self._standing.world:
            done = state.progress.best or state.progress.beats
            if done >= self._every and state.world.all_stepped():
                self._stop("the script has no Checkpointer: there is no state to compare")
            return
        if not self._standing.all_saved or state.nans.since or state.pace.phase == PHASE:
            return  # some have not gone on since the last one
        if self._recomputing.spent():
            self._stop(SPENT)
            return
        if state.world.is_ending():
            return
        schedule = self._schedule
        newest = self._standing.newest + schedule.interval.every - 1
        self._standing.order(next_step(newest, schedule.ahead(), self._every))

    def _pass_over(self, why: str) -> None:
        self._journal.news(f"step {self._standing.step} is not checked: {why}")

    def _go_on(self, now: float | None = None) -> None:
        self.ready = False
        self._standing.release(now)

    def _stop(self, why: str) -> None:
        """No more checks in this job."""
        self._every = 0
        say(f"--robust-verify-every: no steps are computed again from now on: {why}")
        self.text = f"off: {why}"

    # -- while they stand

    async def run(self) -> None:
        """One check. Afterwards the ranks run, or a failure waits for its recovery."""
        step = self._standing.step
        began = self._standing.since or time.monotonic()
        self._recomputing.begin(began)
        self._running, self.ready, self._phase.name = True, False, "checking"
        outcome: Outcome = "unknown"
        try:
            outcome = await self._check(step)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            self._stop(f"internal error: {type(err).__name__}: {err}")
        finally:
            self._running = False
        if not self._recomputing.interrupted():
            await self._recomputing.resume(f"after the check of step {step}")
            self._phase.name = "running"
        self._go_on()  # also if a signal or a failure came: nobody else lets them
        self._account(step, outcome, time.monotonic() - began)

    async def _check(self, step: int) -> Outcome:
        first = await self._recomputing.results(step)
        if not first:
            self._pass_over("not all stores answered in time")
            return "unknown"
        base = await self._recomputing.base(step)
        here = list(self._state.world.places)
        other = self._recomputing.exchanged()
        if base is None or other is None:
            alone = len(here) + len(self._state.spares()) < 2
            why = UNEVEN if not alone else ONE_NODE
            self._miss(step, why if other is None else "memory does not hold a step before it")
            return "unknown"
        self._missed = 0
        names = (f"{new.name} in place of {old.name}" for new, old in zip(other, here, strict=True))
        self._journal.news(f"step {step} is computed again from step {base[0]}: {', '.join(names)}")
        second = await self._recomputing.again(step, base, other)
        if second is None:
            return "interrupted"
        found = conclude(first, second)
        third: Results | None = None
        if found == "again":
            _, what = compare(first, second)
            say(f"step {step} comes out differently on other nodes: {what}; it is computed again")
            third = await self._recomputing.again(step, base, here)
            if third is None:
                return "interrupted"
            found = conclude(first, second, third)
        if found == "agree":
            self._agreed, self._unproven = self._agreed + 1, 0
            self._certificates.line.recomputed(step)
            return "agree"
        if found == "program":
            assert third is not None
            _, what = compare(first, third)
            self._stop(
                f"step {step} comes out differently on the same nodes, too ({what}): the program "
                "is not deterministic, and nobody is to blame"
            )
            return "program"
        if found == "machine" or found == "once":
            return await self._test(step, other, found)
        why = compare(first, second)[1] if third is None else "no third result"
        self._journal.news(f"step {step} could not be compared: {why}")
        return "unknown"

    def _miss(self, step: int, why: str) -> None:
        self._missed += 1
        self._journal.news(f"step {step} is not computed again: {why}")
        if self._missed >= MISSED:
            self._stop(f"it could not be done {MISSED} times in a row: {why}")

    async def _test(
        self, step: int, other: Sequence[Node], outcome: Literal["machine", "once"]
    ) -> Outcome:
        """Test the machines of the first result after one that depends on the node, or came only
        once: all of them, since one wrong gradient is in the state of every rank. ``other``: those
        of the second result."""
        what = f"step {step} depends on the node: twice the same on some, differently on others"
        if outcome == "once":
            names = ",".join(node.name for node in self._state.world.places)
            what = (
                f"step {step} came out differently once, on {names}, and then twice the "
                "same, on other nodes and on these: a device computes wrongly now and then"
            )
        say(f"{what}; it is not certified")
        if why := self._recomputing.hindrance():
            say(f"no machine is tested now: {why}")
            return outcome
        self._unproven += outcome == "machine"
        if self._state.config.stop_tests:
            if not await self._recomputing.stop():
                return "interrupted"
            found = await self._verdict.find(what, step)
            if found is None:
                return "interrupted"
            if found.named:
                return "proven"
            computed = {node.name for node in other}  # what differed, if that comes again
            if outcome == "machine" and not computed.isdisjoint(found.idle):
                self._unproven = 0
                return "proven"  # and what the ranks go on from is not its work
        if self._unproven >= UNPROVEN:
            self._stop(f"{UNPROVEN} times in a row it depended on the node, and no test proves any")
        else:
            say("no machine is proven to be at fault, so none leaves the job")
        return outcome

    def _account(self, step: int, outcome: Outcome, seconds: float) -> None:
        self.seconds += seconds
        nodes = [node.name for node in self._state.world.places]
        self._journal.event(
            "check", step=step, outcome=outcome, seconds=round(seconds, 3), nodes=nodes
        )
        if outcome == "agree":
            self._journal.news(
                f"step {step}, computed on other nodes, is the same ({seconds:.1f} s)"
            )
        if self._every:
            newest = f", newest step {step}" if outcome == "agree" else f"; step {step}: {outcome}"
            times = "step" if self._agreed == 1 else "steps"
            self.text = (
                f"{self._agreed} {times} computed alike on other nodes{newest}; "
                f"{self.seconds:.1f} s in all"
            )
