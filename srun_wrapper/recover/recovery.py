"""One recovery after another: from failures to a running epoch, or to the end of the job."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from robust_slurm.slurm.values import fold
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.certificates import Certificates, spoils
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.decide import ladder
from srun_wrapper.decide.crash import LINE_SHOWN
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import NEWCOMER, without_returned
from srun_wrapper.decide.failure import Failure, how_ended, last_error
from srun_wrapper.decide.flaps import NO_REBOOT
from srun_wrapper.decide.incident import RECOVERED, Incident, ordered
from srun_wrapper.job.reporting import job_log
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import put, say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.recover.code_updates import CodeUpdates
from srun_wrapper.recover.flaps import may_return
from srun_wrapper.recover.independent import count_as_killed
from srun_wrapper.recover.localization import FaultLocalization
from srun_wrapper.recover.nodes import NodeParts
from srun_wrapper.recover.resize.growth import Growth
from srun_wrapper.recover.restarted import Restarted
from srun_wrapper.recover.settling import Settling, at_start
from srun_wrapper.recover.standby.needed import tell_passed_over

STEADY = 3600.0  # s: an epoch that ran this long was progress, whatever it reported
ENDED = "ended by a signal"
SUPERSEDED = "superseded by another failure"
UPDATED = "superseded by an update of the code"


class RecoveryEnd(NamedTuple):
    """The job must end."""

    code: int | None
    """Exit code; None: Slurm has ended the step, and the code is that of its srun."""


class Restoration(NamedTuple):
    """The parts that bring the ranks' states where they are needed."""

    restoring: Restoring
    flushing: Flushing
    certificates: Certificates


class Recovery:
    """Carries the ladder's plans out."""

    def __init__(
        self,
        state: JobState,
        settling: Settling,
        localization: FaultLocalization,
        nodes: NodeParts,
        stopping: Stopping,
        restoration: Restoration,
        restarted: Restarted,
        *,
        code: CodeUpdates,
        growth: Growth | None = None,
        apart: bool = True,
        kill_on_bad: Callable[[], Awaitable[bool]],
        phase: Phase,
        journal: Journal,
        record: Callable[[Incident], None],
        start_epoch: Callable[[str], None],
    ) -> None:
        """``apart``: the ranks' stderr goes elsewhere than ours; ``kill_on_bad``:
        whether srun would end the other tasks when one ends badly; ``record``: account for an
        incident that is over; ``start_epoch``: given the reason."""
        self._state = state
        self._settling = settling
        self._localization = localization
        self._means = nodes.means
        self._release = nodes.release
        self._replacement = nodes.replacement
        self._needed = nodes.needed
        self._reports = nodes.reports
        self._request_ahead = nodes.prerequest.for_vacant
        self._last_rung = nodes.last_rung
        self._stopping = stopping
        self._restoring, self._flushing, self._certificates = restoration
        self._restarted = restarted
        self._code = code
        self._growth = growth
        self._apart = apart
        self._kill_on_bad = kill_on_bad
        self._phase = phase
        self._journal = journal
        self._record = record
        self._start_epoch = start_epoch
        self._numbers = itertools.count(1)
        self._handled: list[Failure] = []  # in the last incident, until it is over

    async def handle(self) -> RecoveryEnd | None:
        """Handle what has failed. None: the ranks run, or there is something new to handle."""
        state = self._state
        self._phase.name = "recovering"
        await self._settling.settle()
        if state.signalled:
            return None
        if not state.failures and not state.stopped():
            self._handled = []
            self._phase.name = "running"  # lost nodes answer again
            return None
        if await self._settling.step_is_over():
            return RecoveryEnd(None)
        if not state.config.rank_env:
            count_as_killed(state, self._journal)
            self._phase.name = "running"
            return None
        if not state.failures and not self._handled:
            await self._start_what_was_stopped()
            return None
        lived = time.monotonic() - state.pace.epoch_since
        incident = self._diagnose(lived)
        await self._look_for_files(incident)
        if not await self._localization.find(incident):
            self._close(incident, self._why_cut_short())
            return None
        suspicion = spoils(incident.diagnosis)
        self._certificates.suspicion = suspicion or self._certificates.suspicion
        done = await self._decide_and_replace(incident)
        if done is not True:
            return done or None
        if not await self._restoring.prepare():
            self._close(incident, self._why_cut_short())
            return None
        await self._start_again(incident, lived)
        return None

    @property
    def update_due(self) -> bool:
        """True if the running ranks are to be restarted with other code, or with more nodes."""
        return self._code.is_due() or bool(self._growth and self._growth.due)

    async def update(self) -> None:
        """Restart the ranks with other code, or with nodes for the places that lack one; the
        recovery of a failure meanwhile does so too."""
        state, change, number = self._state, self._code.due(), self._number()
        epoch = state.world.epoch
        if change is not None:
            line = f"code {change.version} of {change.who}"
            incident = ordered("update", line, change.why or "requested", number, epoch)
        elif self._growth is not None and self._growth.due:
            line = "nodes came for the places that lacked one"
            incident = ordered("grow", line, "training goes on with more nodes", number, epoch)
        else:
            return
        self._phase.name = "recovering"
        incident.began = state.pace.epoch_since
        lived = time.monotonic() - incident.began
        state.members.stop_epoch()
        state.progress.failed()
        self._localization.forgive()
        stopped = await self._stopping.end_world(incident)
        cut_short = not stopped or state.signalled or state.vacant()
        cut_short = cut_short or not await self._replacement.fill(incident)
        if cut_short or not await self._restoring.prepare():
            self._close(incident, self._why_cut_short())
            return
        await self._start_again(incident, lived)

    async def _start_again(self, incident: Incident, lived: float) -> None:
        """Start the ranks, and close the incident once it is known whether they run."""
        incident.mark("restore")
        incident.restored = self._restoring.lines
        diagnosis = incident.diagnosis
        self._code.before_start("; ".join(diagnosis.evidence) if diagnosis.cause == "user" else "")
        self._start_epoch(f"{diagnosis.symptom}: {next(iter(diagnosis.evidence), '')}")
        self._release.release(incident)
        outcome = await self._restarted.prove(incident, lived)
        if outcome != "recovered":
            cut = SUPERSEDED if self._state.failures else UPDATED
            self._close(incident, cut if outcome == "failed" else ENDED)
            return
        self._phase.name = "running"
        self._handled = []
        self._replacement.joined()
        self._means.joined()
        self._close(incident, RECOVERED)
        say(incident.line())
        self._code.resumed()

    # -- before the ladder

    async def _start_what_was_stopped(self) -> None:
        """Start the ranks: nodes that were lost before the first epoch, or in a check, are back."""
        state = self._state
        late = [n for n in state.world.places if n.stopped < state.world.epoch]
        if late:
            await self._stopping.end_ranks(late, lambda: bool(state.failures or state.signalled))
        if state.failures or state.signalled:
            return
        if await self._restoring.prepare():
            self._start_epoch("")
        self._phase.name = "running"

    def _diagnose(self, lived: float) -> Incident:
        """Open the incident of the failures; ``lived``: seconds that the epoch has lived."""
        state, budget = self._state, self._localization.budget
        # Nodes whose loss has cut the last incident short answer again; its ranks are still down.
        again = not state.failures
        failures = self._handled = list(state.failures or self._handled)
        state.failures.clear()
        state.members.stop_epoch()
        # If other code waits, these failures are those of code that will not run again.
        if lived >= STEADY or state.progress.since_failure() or self._code.waits():
            self._localization.forgive()
        state.progress.failed()
        budget.spent = None
        if lived >= STEADY:
            self._replacement.joined()
        just_joined = self._replacement.just_joined()
        names = {text: n.name for n in state.live() for text in (n.name, n.address)}
        places = len(state.world.places)
        local = state.nonfinite.local(state.world.running())
        diagnosis = diagnose(
            failures,
            places,
            just_joined,
            state.catalogue,
            names,
            local,
            none_started=at_start(state) and self._all_failed(failures),
        )
        diagnosis = ladder.of_newcomers(diagnosis, budget)
        suspects = diagnosis.suspects if diagnosis.cause == "node" else ()
        if just_joined.issuperset(suspects or ("",)):
            self._means.unfit(diagnosis.suspects)  # it costs no restart: none was tried
        elif not again:
            budget.spend(diagnosis)
        diagnosis, wrong = ladder.acquit(diagnosis, budget)
        if wrong:
            self._reports.withdraw(wrong, diagnosis.evidence[-1], diagnosis.cause)
        self._journal.event("failure", symptom=diagnosis.symptom, evidence=diagnosis.evidence)
        root = diagnosis.root
        incident = Incident(self._number(), state.world.epoch, diagnosis, root.last_good, root.at)
        incident.began = state.pace.epoch_since
        return incident

    async def _look_for_files(self, incident: Incident) -> None:
        """Look which file a node that has just joined lacks, if its rank's last words name one."""
        diagnosis = incident.diagnosis
        node = self._state.members.named(diagnosis.root.node)
        if diagnosis.rule != NEWCOMER or diagnosis.cause == "user" or node is None:
            return
        what = await self._needed.explain(node, diagnosis.root)
        if what or diagnosis.cause == "node":
            error = last_error(diagnosis.root.tail)[:LINE_SHOWN] or how_ended(diagnosis.root)
            tell_passed_over(node.name, what or f"no other node shows its error: {error}")
        if what:
            self._localization.budget.refund()
            self._means.unfit((node.name,))
            incident.diagnosis = replace(
                diagnosis,
                cause="node",
                suspects=diagnosis.suspects or (node.name,),
                proven=(node.name,),
                exchange=False,
                evidence=(*diagnosis.evidence, f"{node.name}: {what}"),
            )

    def _all_failed(self, failures: Sequence[Failure]) -> bool:
        """Return True if each rank of the job has ended badly."""
        ended = sum(failure.symptom == "crash" for failure in failures)
        return ended >= self._state.world.size

    def _number(self) -> str:
        return self._state.incident_id(next(self._numbers))

    # -- the ladder

    async def _decide_and_replace(self, incident: Incident) -> RecoveryEnd | bool:
        """Climb the ladder until the ranks are down and every place has a node.

        False: another failure, or the step's end, cut the incident short.
        """
        state, budget = self._state, self._localization.budget
        await self._settling.settle_spares(len(state.vacant()))
        means = replace(self._means.now(), other_code=self._code.other())
        lost = state.vacant()
        while True:
            diagnosis = without_returned(incident.diagnosis, state.vacant())
            diagnosis = incident.diagnosis = ladder.with_suspects(diagnosis, budget.nodes)
            plan = incident.plan = ladder.plan(diagnosis, state.vacant(), budget, means)
            if plan.action in ("stop", "requeue") and not means.hindered:
                if await self._answers_again():
                    continue
                if state.signalled or state.failures:
                    return self._cut_short(incident)
            incident.mark("decide")
            job_log.decided(incident)
            self._journal.news(f"{'; '.join(diagnosis.evidence)} -> {plan.action} ({plan.why})")
            if plan.action == "stop":
                return await self._give_up(incident, plan)
            if plan.action == "requeue":
                return await self._requeue(incident, plan)
            filled = await self._stop_and_fill(incident, plan)
            if filled and not state.failures:
                if plan.replace and not incident.swaps and not incident.resized:
                    incident.diagnosis = without_returned(diagnosis, ())
                    incident.plan = ladder.BACK
                elif plan.replace:
                    await self._replacement.arrange()
                elif plan.exchange:
                    self._exchange(incident, plan.exchange)
                incident.mark("replace")
                kept = plan.kept if incident.swaps else ()
                budget.evict(diagnosis, incident.swaps, lost, kept)
                return True
            incident.mark("replace")
            if state.signalled or state.failures:
                return self._cut_short(incident)
            # No replacement came: the next rung, with what is left.
            self._release.reinstate(plan.replace)
            means = self._means.now(standby_nodes=0)
            if plan.action == "swap_spare":
                means = replace(means, spares=0)  # those that are left have too few slots

    def _cut_short(self, incident: Incident) -> bool:
        """Close an incident that another failure, or the step's end, cut short; return False."""
        if not self._state.signalled:
            self._localization.refund()
        self._close(incident, self._why_cut_short())
        return False

    async def _answers_again(self) -> bool:
        """Wait for lost nodes that may only be cut off, before the job gives up its nodes.

        A requeue takes minutes. True: one of them answers.
        """
        state, before, now = self._state, self._state.vacant(), time.monotonic()
        cut_off = [node for node in state.world.places if may_return([node], now, NO_REBOOT)]
        seconds = may_return(cut_off, now, NO_REBOOT)
        if not seconds:
            return False
        names = fold(node.name for node in cut_off)
        say(f"{names} may only be cut off: waiting up to {seconds:.0f} s for an answer")

        def back() -> bool:
            return not set(before) <= set(state.vacant())

        await state.until(lambda: back() or state.signalled > 0 or bool(state.failures), seconds)
        return back() and not state.signalled

    async def _stop_and_fill(self, incident: Incident, plan: ladder.LadderPlan) -> bool:
        """End the ranks and put a node in every place. False: not possible, or a new failure."""
        self._release.evict(plan.replace, incident)
        if plan.action == "swap_standby":
            self._request_ahead()
        failures = self._localization.budget.failures
        rejoin = self._means.rejoin(incident, failures, self._code.waits())
        ended = await self._stopping.end_world(incident, rejoin)
        filled = ended and await self._replacement.fill(incident)
        places = self._state.world.places
        if filled and any(isinstance(n.order, Stop) and n.stopped < n.order.epoch for n in places):
            return await self._stopping.end_world(incident, rejoin)  # of a node that is back
        return filled

    def _exchange(self, incident: Incident, name: str) -> None:
        other = self._replacement.exchange(name)
        done = f"{name} exchanges its ranks with {other}"
        line = done if other else f"no node can take the ranks of {name}: they stay"
        say(line)
        self._journal.event("exchanged", node=name, other=other)
        diagnosis = incident.diagnosis
        incident.diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, line))

    # -- the end of an incident

    def _why_cut_short(self) -> str:
        return ENDED if self._state.signalled else SUPERSEDED

    def _close(self, incident: Incident, outcome: str) -> None:
        incident.outcome = outcome
        incident.counters = self._state.show_counters(incident.diagnosis.suspects)
        job_log.closed(incident)
        self._record(incident)

    async def _give_up(self, incident: Incident, plan: ladder.LadderPlan) -> RecoveryEnd:
        root = incident.diagnosis.root
        world = self._state.world
        own = world.exit_code()  # of those that have ended by themselves
        if own and not plan.code and not world.all_exited() and await self._kill_on_bad():
            own = max(own, 128 + signal.SIGTERM)  # srun's code is also of those that it ends
        self._release.evict(incident.diagnosis.proven, incident)  # for the next job on these nodes
        self._reports.report_silent()
        await self._stopping.end_world(incident)
        await self._state.counters_read()
        self._close(incident, f"stopped: {plan.why}")
        say(f"stopped: {plan.why}: {'; '.join(incident.diagnosis.evidence)}")
        if self._apart and root.tail.strip():  # else the user has it already
            say(f"last output of rank {root.rank} on {root.node}:")
            put(root.tail.rstrip().encode(errors="replace") + b"\n")
        self._phase.name = "failed"
        return RecoveryEnd(plan.code or own or ladder.GAVE_UP)

    async def _requeue(self, incident: Incident, plan: ladder.LadderPlan) -> RecoveryEnd:
        self._release.evict(plan.replace, incident)
        await self._stopping.end_world(incident)
        await self._flushing.flush(flushing.END)  # memory does not outlive the job's step
        error = await self._last_rung.requeue()
        incident.mark("replace")
        if error:
            say(error)
            self._close(incident, f"requeue failed: {error}")
            self._phase.name = "failed"
            return RecoveryEnd(ladder.NOTHING_LEFT)
        self._phase.name = "requeued"
        self._close(incident, "requeued")
        bad = ",".join(name for name in plan.replace if name in self._last_rung.excluded)
        without = f" without {bad}" if bad else ""
        say(f"{plan.cause}: the job is requeued{without}")
        return RecoveryEnd(ladder.REQUEUED)
