"""Recomputed steps: every so many, other nodes compute one once more; it must come out alike.

The ranks stand after a step; robust-srun reads the checksums of all their state, starts them on
other nodes from the step before, and compares what they hold when they stand there again. Where
that agrees training goes on from there. What follows if not: ``verify_rules``; why so:
docs/decisions/0035-certified-steps.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from robust_slurm.checkpoint.format.state_sum import PHASE
from srun_wrapper.checkpoints.verify_reads import before, exchanged, results, spent
from srun_wrapper.checkpoints.verify_rules import (
    MISSED,
    ONE_NODE,
    UNEVEN,
    UNPROVEN,
    Results,
    compare,
    conclude,
    next_step,
    standing,
)
from srun_wrapper.command.input_rules import SPENT
from srun_wrapper.decide.diagnose import Diagnosis, Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.protocol.checkpoint_messages import StandAt
from srun_wrapper.recover.machine_tests import Found
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import Node, Role

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

AGAIN = 1.0  # s between two words to go on: a node that is connecting anew hears only a later one
POLL = 0.05  # s; a rank that stands is told of in a report, which wakes nobody
NOBODY = -1

Outcome = Literal["agree", "program", "machine", "once", "proven", "unknown", "interrupted"]


class Verify:
    """Asks for checks while the ranks run, and carries one out while they stand."""

    def __init__(self, boss: Supervisor) -> None:
        self._boss = boss
        self._every = boss.config.verify_every
        self._step = NOBODY  # after which the ranks are to stand
        self._since: float | None = None  # the first has stood
        self._from = math.inf  # signals that have come since may be forgotten in a stop
        self._told = -math.inf  # when the ranks were told to go on
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
        return self._since is not None

    # -- while the ranks run

    def begin(self) -> None:
        """An epoch begins; what was asked of the last one's ranks is forgotten."""
        if not self._running:
            self._step, self._since, self.ready = NOBODY, None, False

    def look(self, now: float) -> None:
        """Ask the ranks to stand; see whether they do, and that none does afterwards."""
        state = self._boss.state
        if not self._boss.config.verify_every or self._running:
            return
        if state.signalled and self._step != NOBODY:
            self._go_on()  # or they could do nothing about it
        if self._step == NOBODY and state.pace.phase == PHASE and now - self._told >= AGAIN:
            self._go_on(now)
        if state.signalled or state.failures or state.stopped():
            return
        if not self._every or self.ready or self._boss.phase != "running":
            return
        if self._step == NOBODY:
            self._ask()
            return
        where = self._standing(now)
        if where == "wait" and self.held_up and state.world.is_ending():
            where = "over"
        if where == "all" and self._boss.checkpoints.unwritten(self._step):
            # The step itself is written by the ranks that compute it again.
            self._boss.news(f"step {self._step} is not checked: an older one is not on disk yet")
            self._go_on(now)
        elif where == "all":
            self.ready = True
            self._boss.state.changed.set()
        elif where == "over":
            self._boss.news(f"step {self._step} is not checked: not all ranks stood there in time")
            self._go_on(now)

    def _ask(self) -> None:
        checkpoints, state = self._boss.checkpoints, self._boss.state
        world = checkpoints.world
        if not world:
            done = state.progress.best or state.progress.beats
            if done >= self._every and state.world.all_stepped():
                self._stop("the script has no Checkpointer: there is no state to compare")
            return
        if len(checkpoints.saved) < world or state.nans.since or state.pace.phase == PHASE:
            return  # some have not gone on since the last one
        if spent(self._boss.state):
            self._stop(SPENT)
            return
        newest = max(saved.step for saved in checkpoints.saved.values())
        newest += checkpoints.interval.every - 1
        if state.world.is_ending():
            return
        self._step = next_step(newest, checkpoints.ahead(), self._every)
        self._boss.bus.broadcast(StandAt(self._step))

    def _standing(self, now: float) -> Literal["wait", "all", "over"]:
        checkpoints = self._boss.checkpoints
        saved = {rank: each.step for rank, each in checkpoints.saved.items()}
        phase = self._boss.state.pace.phase
        if self._since is None and (phase == PHASE or self._step in saved.values()):
            self._since = now
        waited = 0.0 if self._since is None else now - self._since
        step_time = self._boss.state.pace.step_time()
        return standing(saved, checkpoints.world, self._step, waited, step_time)

    def _go_on(self, now: float | None = None) -> None:
        self._step, self._since, self.ready = NOBODY, None, False
        self._told = time.monotonic() if now is None else now
        self._boss.bus.broadcast(StandAt(NOBODY))

    def _stop(self, why: str) -> None:
        """No more checks in this job."""
        self._every = 0
        say(f"--robust-verify-every: no steps are computed again from now on: {why}")
        self.text = f"off: {why}"

    # -- while they stand

    async def run(self) -> None:
        """One check. Afterwards the ranks run, or a failure waits for its recovery."""
        boss, state, step = self._boss, self._boss.state, self._step
        began = self._since or time.monotonic()
        self._from = began - (state.pace.step_time() or 0.0)
        self._running, self.ready, boss.phase = True, False, "checking"
        outcome: Outcome = "unknown"
        try:
            outcome = await self._check(step)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            self._stop(f"internal error: {type(err).__name__}: {err}")
        finally:
            self._running = False
        if not self._interrupted():
            if state.stopped() and await boss.restoring.prepare():
                boss.begin_epoch(f"after the check of step {step}")
            boss.phase = "running"
        self._go_on()  # also if a signal or a failure came: nobody else lets them
        self._account(step, outcome, time.monotonic() - began)

    async def _check(self, step: int) -> Outcome:
        boss = self._boss
        first = await results(boss, step, self._over)
        if not first:
            boss.news(f"step {step} is not checked: not all stores answered in time")
            return "unknown"
        base = await before(boss, step)
        here = list(boss.state.world.places)
        other = exchanged(boss)
        if base is None or other is None:
            alone = len(here) + len(boss.state.spares()) < 2
            why = UNEVEN if not alone else ONE_NODE
            why = why if other is None else "memory does not hold a step before it"
            self._missed += 1
            boss.news(f"step {step} is not computed again: {why}")
            if self._missed >= MISSED:
                self._stop(f"it could not be done {MISSED} times in a row: {why}")
            return "unknown"
        self._missed = 0
        names = (f"{new.name} in place of {old.name}" for new, old in zip(other, here, strict=True))
        boss.news(f"step {step} is computed again from step {base[0]}: {', '.join(names)}")
        second = await self._again(step, base, other)
        if second is None:
            return "interrupted"
        found = conclude(first, second)
        third: Results | None = None
        if found == "again":
            _, what = compare(first, second)
            say(f"step {step} comes out differently on other nodes: {what}; it is computed again")
            third = await self._again(step, base, here)
            if third is None:
                return "interrupted"
            found = conclude(first, second, third)
        if found == "agree":
            self._agreed, self._unproven = self._agreed + 1, 0
            boss.certificates.line.recomputed(step)
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
        boss.news(f"step {step} could not be compared: {why}")
        return "unknown"

    async def _test(
        self, step: int, other: Sequence[Node], outcome: Literal["machine", "once"]
    ) -> Outcome:
        """Test the machines of the first result after one that depends on the node, or came only
        once: all of them, since one wrong gradient is in the state of every rank. ``other``: those
        of the second result."""
        boss, state = self._boss, self._boss.state
        places = list(state.world.places)
        names = [node.name for node in places]
        what = f"step {step} depends on the node: twice the same on some, differently on others"
        if outcome == "once":
            what = (
                f"step {step} came out differently once, on {','.join(names)}, and then twice the "
                "same, on other nodes and on these: a device computes wrongly now and then"
            )
        say(f"{what}; it is not certified")
        if why := self._hindrance():
            say(f"no machine is tested now: {why}")
            return outcome
        self._unproven += outcome == "machine"
        if boss.config.stop_tests:
            if not await self._stopped():
                return "interrupted"
            found = await boss.stop_tests.ask(names, "nan")
            if found is None:
                return "interrupted"
            if found.idle:
                self._leave(what, found, step)
            if found.named:
                # Now it is a failure like any other, and the newest states are in doubt.
                at = time.monotonic()
                named = tuple(found.named)
                lines = (what, *found.lines)
                failure = Failure(
                    "differs", at, at, named[0], evidence=lines, suspects=named, step=step
                )
                state.failures.append(failure)
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

    def _leave(self, what: str, found: Found, step: int) -> None:
        """Nodes without ranks that are bad take no place from now on, as after a failure."""
        at = time.monotonic()
        lines = (what, *found.lines)
        root = Failure("differs", at, at, "", evidence=lines, step=step)
        diagnosis = Diagnosis("differs", "node", (), lines, "differs", root)
        number = f"{self._boss.state.step_id}-check-{step}"
        incident = Incident(number, self._boss.state.world.epoch, diagnosis, at, at)
        self._boss.replacement.leave(found.idle, incident)

    async def _again(
        self, step: int, base: tuple[int, int], places: Sequence[Node]
    ) -> Results | None:
        """Have these nodes compute the step from ``base``. None if a failure or the end came."""
        boss = self._boss
        if why := self._hindrance():
            boss.news(f"step {step} is not computed again: {why}")
            return {}
        if not await self._stopped():
            return None
        lost = [n.name for n in places if n.gone or (n.role is Role.SPARE and not n.connection)]
        if lost:  # the nodes of before go on
            boss.news(f"step {step} is not computed again: {','.join(lost)} is lost")
            return {}
        self._seat(places)
        if not await boss.restoring.prepare(base, step):
            return None
        if boss.restoring.step != base[0]:
            return {}  # it could not be brought where it is needed
        self._step, self._since = step, None
        boss.begin_epoch(f"step {step} is computed again to check it")
        while self._standing(time.monotonic()) == "wait" and not self._interrupted():
            await boss.state.until(self._over, POLL)
            if boss.state.world.all_exited():
                break
        if self._interrupted():
            return None
        return await results(boss, step, self._over)

    def _hindrance(self) -> str:
        """Reason why ranks that stand must not be stopped now, or they would lose something."""
        state = self._boss.state
        if state.passed_at >= self._from:
            return "a signal has come for the ranks, which may not have acted on it"
        if spent(self._boss.state):
            return SPENT
        return "ranks have ended" if state.world.is_ending() else ""

    async def _stopped(self) -> bool:
        """End the ranks as a restart does; False if a failure or the end came."""
        state = self._boss.state
        state.stopping_epoch = state.world.epoch
        staying = [node for node in state.world.places if node.role is Role.ACTIVE]
        await self._boss.stopping.end_ranks(staying, self._interrupted)
        return not self._interrupted() and not state.vacant()

    def _seat(self, places: Sequence[Node]) -> None:
        state = self._boss.state
        before = list(state.world.places)
        state.world.places[:] = places
        for node in before:
            if node not in places and node.role is Role.ACTIVE:
                state.move(node, Role.SPARE)
        for node in places:
            if node.role is Role.SPARE:
                state.move(node, Role.ACTIVE)

    def _over(self) -> bool:
        return self._interrupted() or self._boss.state.world.all_exited()

    def _interrupted(self) -> bool:
        state = self._boss.state
        return bool(state.failures) or state.signalled > 0 or self._boss.step.ended

    def _account(self, step: int, outcome: Outcome, seconds: float) -> None:
        boss = self._boss
        self.seconds += seconds
        boss.account.checking += seconds
        nodes = [node.name for node in boss.state.world.places]
        boss.ledger.event(
            "check", step=step, outcome=outcome, seconds=round(seconds, 3), nodes=nodes
        )
        if outcome == "agree":
            boss.news(f"step {step}, computed on other nodes, is the same ({seconds:.1f} s)")
        if self._every:
            newest = f", newest step {step}" if outcome == "agree" else f"; step {step}: {outcome}"
            times = "step" if self._agreed == 1 else "steps"
            self.text = (
                f"{self._agreed} {times} computed alike on other nodes{newest}; "
                f"{self.seconds:.1f} s in all"
            )
