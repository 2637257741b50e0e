"""The life of a job in observe mode: faults are detected and reported, and nothing is touched.

The ranks' shims end by themselves, each node's when its ranks have (``TaskOptions.alone``), so srun
and Slurm treat the step as they treat any other. The exit code is srun's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.settling import Settling
from srun_wrapper.supervisor.step.real_step import RealStep

LAST = 1.0  # s for the news of how ranks ended to follow srun's end
ACTIONS = {
    "restart": "restart all ranks in place",
    "swap_spare": "swap {nodes} with a spare of the allocation",
    "swap_standby": "swap {nodes} with a node of the standby partition",
    "shrink": "go on without {nodes}, with fewer ranks",
    "requeue": "requeue the job without {nodes}",
    "stop": "stop the job",
}


class Observing:
    """Follows the step to its end, and reports what a recovery would have done."""

    def __init__(
        self,
        state: JobState,
        step: RealStep,
        settling: Settling,
        means: Callable[[], ladder.Means],
        journal: Journal,
        record: Callable[[Mapping[str, object]], None],
    ) -> None:
        """``means``: those of a recovery; ``record``: write an incident's record."""
        self._state = state
        self._step = step
        self._settling = settling
        self._means = means
        self._journal = journal
        self._record = record
        self._budget = ladder.Budget()
        self._numbers = itertools.count(1)
        self._beats: int | None = None  # of the job's ranks, when the last incident was reported
        self._hung = False  # since that

    async def run(self) -> int:
        """Follow the step until srun has ended; returns srun's exit code."""
        state = self._state
        while not self._step.ended:
            await state.until(self._something_to_do, None)
            for node in self._ended_nodes():
                state.members.move(node, Role.RELEASED)
            if state.failures:
                await self._observe()
        await state.until(lambda: bool(state.failures), LAST)
        if state.failures:
            await self._observe()
        return self._step.code or 0

    def standing_still(self) -> bool:
        """True if a hang was reported and no step has come since: nothing is looked for again."""
        return self._hung and self._beats == self._state.progress.beats

    def _something_to_do(self) -> bool:
        return self._step.ended or bool(self._state.failures) or bool(self._ended_nodes())

    def _ended_nodes(self) -> list[Node]:
        """Return the nodes all of whose ranks have ended: their shims end, too."""
        world = self._state.world

        def ended(number: int) -> bool:
            return number in world.by_rank and world.by_rank[number].exit is not None

        return [
            node
            for node, ranks in zip(world.places, world.ranks, strict=True)
            if node.role is Role.ACTIVE and all(map(ended, ranks))
        ]

    async def _observe(self) -> None:
        """Report the failures: an incident if it is the first, or steps were made since the last.

        What follows without a step in between is a consequence: nobody has recovered the job.
        """
        state = self._state
        await self._settling.settle()
        failures = list(state.failures)
        state.failures.clear()
        if not failures or state.signalled:
            return
        self._hung = self._hung or any(f.symptom == "hang" for f in failures)
        names = {text: n.name for n in state.live() for text in (n.name, n.address)}
        local = state.nonfinite.local(state.world.running())
        places = len(state.world.places)
        diagnosis = diagnose(failures, places, (), state.catalogue, names, local)
        self._journal.event("failure", symptom=diagnosis.symptom, evidence=diagnosis.evidence)
        if self._beats == state.progress.beats:
            return
        if self._beats is not None:
            self._budget.refill()
        self._beats = state.progress.beats
        self._budget.spend(diagnosis)
        diagnosis, _ = ladder.acquit(diagnosis, self._budget)
        self._report(diagnosis)

    def _report(self, diagnosis: Diagnosis) -> None:
        state, root = self._state, diagnosis.root
        diagnosis = ladder.with_suspects(diagnosis, self._budget.nodes)
        lost = tuple(n.name for n in state.world.places if n.role is Role.DEAD)
        plan = ladder.plan(diagnosis, lost, self._budget, self._means())
        number = state.incident_id(next(self._numbers))
        incident = Incident(number, state.world.epoch, diagnosis, root.last_good, root.at)
        what = ACTIONS[plan.action].format(nodes=", ".join(plan.replace) or "the suspect")
        incident.outcome = f"observed: would {what}"
        incident.counters = state.show_counters(diagnosis.suspects)
        self._record(incident.record(state.job_id, state.step_id))
        took = max(0.0, time.monotonic() - root.last_good)
        say(
            f"observed after {took:.2f} s: {'; '.join(diagnosis.evidence)}; would {what} "
            f"({plan.why}); nothing was done (--robust=observe)"
        )
