"""One recovery after another: from failures to a running epoch, or to the end."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import TYPE_CHECKING

from srun_wrapper.agent.processes.stop_stages import longest
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.certificates import spoils
from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnose import (
    Failure,
    diagnose,
    is_cascade,
    killed_by,
    node_error,
    without_returned,
)
from srun_wrapper.decide.incident import RECOVERED, Incident
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.recover.localization import Culprit
from srun_wrapper.recover.replace import Replacement
from srun_wrapper.recover.restarted import proven
from srun_wrapper.supervisor import job_log
from srun_wrapper.supervisor.report import put, say
from srun_wrapper.supervisor.roster import Role

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

SETTLE = 0.3  # s to wait for the root of a failure that looks like a consequence
SETTLE_ALIKE = 1.0  # s for other nodes to show the error for which a node would be blamed
SETTLE_MAX = 4.0
SETTLE_NODES = 1.5  # s for other silent nodes to be judged when one is lost
# Signals that people send: the news that Slurm sent one to all may come after a rank's death of it.
SENDABLE = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTERM, signal.SIGALRM),
}
STEADY = 3600.0  # s: an epoch that ran this long was progress, whatever it reported
SRUN_END = 1.0  # s for srun to end when its tasks have
ENDED = "ended by a signal"
SUPERSEDED = "superseded by another failure"


class Recovery:
    """Carries the ladder's plans out."""

    def __init__(self, supervisor: Supervisor, replacement: Replacement) -> None:
        self._boss = supervisor
        self._state = supervisor.state
        self._replacement = replacement
        self._culprit = Culprit(supervisor, replacement, self._stop_world)
        self._numbers = itertools.count(1)
        self._handled: list[Failure] = []  # in the last incident, until it is over

    async def handle(self) -> int | None:
        """Handle what has failed; an exit code when the job must end."""
        state = self._state
        self._boss.phase = "recovering"
        await self._settle()
        if state.signalled:
            return None
        if not state.failures and not state.stopped():
            self._handled = []
            self._boss.phase = "running"  # lost nodes answer again
            return None
        if await self._step_is_over():
            return await self._boss.step_ended()
        if not self._boss.config.rank_env:
            self._let_go()
            return None
        # Nodes whose loss has cut the last incident short answer again: its ranks are down still.
        again = not state.failures
        if again and not self._handled:  # they were lost before the first epoch, or in a check
            late = [n for n in state.world.places if n.stopped < state.world.epoch]
            if late:
                await self._boss.stopping.end_ranks(
                    late, lambda: bool(state.failures or state.signalled)
                )
            if state.failures or state.signalled:
                return None
            if await self._boss.restoring.prepare():
                self._boss.begin_epoch("")
            self._boss.phase = "running"
            return None
        failures = self._handled = list(state.failures or self._handled)
        state.failures.clear()
        state.stopping_epoch = state.world.epoch
        lived = time.monotonic() - state.pace.epoch_since
        if lived >= STEADY or state.progress.since_failure():
            self._culprit.forgive()
        state.progress.failed()
        self._culprit.budget.spent = None
        newcomers = self._replacement.newcomers()
        diagnosis = diagnose(failures, len(state.world.places), newcomers)
        if newcomers.issuperset(diagnosis.suspects or ("",)):
            self._replacement.unfit(diagnosis.suspects)  # it costs no restart: none was tried
        elif not again:
            self._culprit.budget.spend(diagnosis)
        diagnosis, wrong = ladder.acquit(diagnosis, self._culprit.budget)
        if wrong:
            self._replacement.withdraw(wrong, diagnosis.evidence[-1])
        root = diagnosis.root
        incident = Incident(
            f"{self._state.step_id}-{next(self._numbers)}",
            state.world.epoch,
            diagnosis,
            root.last_good,
            root.at,
        )
        self._boss.ledger.event("failure", symptom=diagnosis.symptom, evidence=diagnosis.evidence)
        if not await self._culprit.find(incident):
            self._close(incident, ENDED if state.signalled else SUPERSEDED)
            return None
        diagnosis = incident.diagnosis
        certificates = self._boss.certificates
        certificates.suspicion = spoils(diagnosis) or certificates.suspicion
        await self._replacement.settle_spares(len(state.vacant()))
        means = self._replacement.means()
        lost = state.vacant()
        while True:
            diagnosis = incident.diagnosis = without_returned(diagnosis, state.vacant())
            incident.plan = ladder.plan(diagnosis, state.vacant(), self._culprit.budget, means)
            incident.mark("decide")
            job_log.decided(incident)
            plan = incident.plan
            self._boss.news(f"{'; '.join(diagnosis.evidence)} -> {plan.action} ({plan.why})")
            if plan.action == "stop":
                return await self._give_up(incident, root)
            if plan.action == "requeue":
                return await self._requeue(incident)
            self._replacement.leave(plan.replace, incident)
            if plan.action == "swap_companion":
                self._replacement.expect()
            filled = await self._stop_world(incident) and await self._replacement.fill(incident)
            if filled and any(
                isinstance(n.order, Stop) and n.stopped < n.order.epoch for n in state.world.places
            ):
                filled = await self._stop_world(incident)  # of a node that answers again
            if filled and not state.failures:
                if plan.replace and not incident.swaps:
                    incident.diagnosis = without_returned(diagnosis, ())
                    incident.plan = ladder.Plan("restart", (), "the lost nodes answer again")
                elif plan.replace:
                    await self._boss.topology.arrange()
                incident.mark("replace")
                break
            incident.mark("replace")
            if state.signalled:
                self._close(incident, ENDED)
                return None
            if state.failures:
                self._culprit.refund()
                self._close(incident, SUPERSEDED)
                return None
            # No replacement came: the next rung, with what is left.
            self._replacement.take_back(plan.replace)
            means = self._replacement.means(companions=0)
        self._culprit.budget.evict(diagnosis, incident.swaps, lost)
        if not await self._boss.restoring.prepare():
            outcome = ENDED if state.signalled else SUPERSEDED
            self._close(incident, outcome)
            return None
        incident.mark("restore")
        incident.restored = self._boss.restoring.lines
        reason = f"{diagnosis.symptom}: {diagnosis.evidence[0] if diagnosis.evidence else ''}"
        self._boss.begin_epoch(reason)
        self._replacement.release(incident)
        if not await proven(self._boss, incident, lived):
            self._close(incident, SUPERSEDED)
            return None
        if state.signalled or self._boss.step.ended:
            self._close(incident, ENDED)
            return None
        self._boss.phase = "running"
        self._handled = []
        self._close(incident, RECOVERED)
        say(incident.line())
        return None

    def _let_go(self) -> None:
        """Independent tasks died with their node or its agent: that is their end, as under srun."""
        state = self._state
        for failure in state.failures:
            ranks = [r for r in state.world.by_rank.values() if r.node.name == failure.node]
            ended = [r for r in ranks if r.exit is None]
            for rank in ended:
                rank.node.silent_as = None  # if it answers again, it is told to end
                state.world.note_exit(rank, 0, int(signal.SIGKILL))
            if ended:
                numbers = ", ".join(str(rank.rank) for rank in ended)
                why = "; ".join(failure.evidence) or failure.tail
                tasks = "task" if len(ended) == 1 else "tasks"
                ends = "counts" if len(ended) == 1 else "count"
                say(
                    f"{why}: {tasks} {numbers} {ends} as killed (exit code 137), the others go on; "
                    "with --robust-no-rank-env no task is restarted"
                )
                self._boss.ledger.event("failure", symptom=failure.symptom, evidence=[why])
        state.failures.clear()
        self._boss.phase = "running"

    async def _settle(self) -> None:
        """Wait for what belongs together.

        While all failures seen look like consequences, their root is still to come; when a node
        is lost, others that are silent now (the same switch, the same power) go with it; and what
        one node cannot run or reports of itself, the others may only be slower to refuse or show.
        """
        state = self._state
        await self._outlast()
        began = time.monotonic()
        while any(f.symptom == "node_lost" for f in state.failures) and (
            self._boss.node_watch.doubtful() and time.monotonic() - began < SETTLE_NODES
        ):
            await asyncio.sleep(0.02)
        await self._outlast()  # one may have been seen only now
        while (  # an error that points to the machine: here only, or everywhere?
            any(f.symptom == "crash" and node_error(f)[0] for f in state.failures)
            and not state.signalled
            and not state.world.all_nodes_ended()
            and time.monotonic() - began < SETTLE_ALIKE
        ):
            await asyncio.sleep(0.02)
        while (  # a command that cannot be run: here only, or everywhere?
            any(not f.launched for f in state.failures)
            and not state.signalled
            and not state.world.all_tried()
            and time.monotonic() - began < SETTLE_MAX
        ):
            await asyncio.sleep(0.02)
        while state.nans_open() and not state.signalled:
            await asyncio.sleep(0.02)
        while state.failures and all(is_cascade(f) for f in state.failures) and not state.signalled:
            waited = time.monotonic() - began
            open_question = (
                waited < SETTLE or self._boss.node_watch.doubtful() or self._being_signalled()
            )
            if waited >= SETTLE_MAX or not open_question:
                return
            await asyncio.sleep(0.02)
        while (
            not state.signalled
            and time.monotonic() - began < SETTLE
            and (
                self._being_signalled()
                or any(not f.launched or killed_by(f) in SENDABLE for f in state.failures)
            )
        ):
            await asyncio.sleep(0.02)

    async def _outlast(self) -> None:
        """Wait while a shared cause makes nodes silent; what is lost by itself is asked for."""
        state = self._state
        while self._boss.node_watch.waiting() and not (state.signalled or self._boss.step.ended):
            if state.vacant():
                self._replacement.expect()
            await asyncio.sleep(0.02)

    async def _step_is_over(self) -> bool:
        """True if Slurm has ended the whole step: all its shims are gone from nodes that live.

        To restart or requeue what a user has cancelled would be against his will. A node that
        crashed says no farewell: its connection stays, and nothing is waited for. srun ends too,
        but after a swap only much later.
        """
        state = self._state
        own = [node for node in (*state.world.places, *state.spares()) if not node.companion]
        if not own or any(node.connection for node in own):
            return False

        # A shim behind a firewall cannot be asked; that its connection ended too must do.
        asked = [node for node in own if node.second_way is not False]

        def over() -> bool:
            gone = bool(asked) and all(node.refused for node in asked)
            return self._boss.step.ended or gone

        return await state.until(over, SRUN_END)

    def _being_signalled(self) -> bool:
        """Some shims were signalled by Slurm: is the whole step being ended?"""
        return not self._state.signalled and any(n.signalled for n in self._state.live())

    async def _stop_world(self, incident: Incident) -> bool:
        """End all ranks of this epoch on the nodes that stay; False if another failure came."""
        state = self._state
        staying = [n for n in state.world.places if n.role is Role.ACTIVE]
        await self._boss.stopping.end_ranks(
            staying, lambda: bool(state.failures) or state.signalled > 0
        )
        incident.mark("stop")
        incident.stages = longest(node.stages for node in staying)
        progress = state.progress  # the last reports are in now
        incident.step_before = progress.best if progress.numbered else progress.saved
        return not state.failures

    def _close(self, incident: Incident, outcome: str) -> None:
        incident.outcome = outcome
        job_log.closed(incident)
        self._boss.account.incident(incident, self._state.pace.step_time())
        self._boss.ledger.incident(incident.record(self._state.job_id, self._state.step_id))
        self._boss.write_roster()

    async def _give_up(self, incident: Incident, root: Failure) -> int:
        assert incident.plan is not None
        code = incident.plan.code
        own = root.code if root.code is not None else 128 + (root.signal or 0)
        code = code or own or ladder.GAVE_UP
        self._replacement.leave(incident.diagnosis.proven, incident)  # accused, for whoever is next
        self._replacement.report_silent()
        await self._stop_world(incident)
        self._close(incident, f"stopped: {incident.plan.why}")
        say(f"stopped: {incident.plan.why}: {'; '.join(incident.diagnosis.evidence)}")
        if root.tail.strip():
            say(f"last output of rank {root.rank} on {root.node}:")
            put(root.tail.rstrip().encode(errors="replace") + b"\n")
        self._boss.phase = "failed"
        await self._boss.finish()
        return code

    async def _requeue(self, incident: Incident) -> int:
        assert incident.plan is not None
        self._replacement.leave(incident.plan.replace, incident)
        await self._stop_world(incident)
        await self._boss.flushing.flush(flushing.END)  # memory does not outlive the job's step
        error = await self._replacement.requeue(incident)
        incident.mark("replace")
        if error:
            say(error)
            self._close(incident, f"requeue failed: {error}")
            self._boss.phase = "failed"
            await self._boss.finish()
            return ladder.NOTHING_LEFT
        self._boss.phase = "requeued"
        self._close(incident, "requeued")
        names = incident.plan.replace
        bad = ",".join(name for name in names if name in self._replacement.excluded)
        without = f" without {bad}" if bad else ""
        say(f"no node can replace {','.join(names)}: the job is requeued{without}")
        await self._boss.finish()
        return ladder.REQUEUED
