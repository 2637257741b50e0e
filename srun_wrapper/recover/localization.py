"""Before the ladder decides: who did it? Machines are tested, or the job is replayed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnose import Diagnosis
from srun_wrapper.decide.incident import Incident
from srun_wrapper.recover import machine_tests
from srun_wrapper.recover.replace import Replacement
from srun_wrapper.replay import replaying

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

TEST_TRIES = 2  # in a row that told nothing: a third would not either


class Culprit:
    """Looks for the machine at fault, with the ranks down; keeps the budget of failures."""

    def __init__(
        self,
        supervisor: Supervisor,
        replacement: Replacement,
        stop_world: Callable[[Incident], Awaitable[bool]],
    ) -> None:
        self._boss = supervisor
        self._replacement = replacement
        self._stop_world = stop_world
        self.budget = ladder.Budget()
        self._tested = self._replayed = False  # since the last progress
        self._tries = 0  # of tests that told nothing

    def forgive(self) -> None:
        """The job came further, or what held it back is found: count from here."""
        self.budget.refill()
        self._tested = self._replayed = False
        self._tries = 0

    def refund(self) -> None:
        """Nothing was tried: the next failure will be."""
        if all(f.symptom != "hang" for f in self._boss.state.failures):
            self.budget.refund()

    async def find(self, incident: Incident) -> bool:
        """Put what is found into the incident; False if another failure or a signal came."""
        for due, ask in ((self._tests_due, self._test), (self._replay_due, self._replay)):
            if self._boss.state.vacant() or not due(incident.diagnosis):
                continue
            incident.mark("decide")
            if not await self._stop_world(incident):
                return False
            found = await ask(incident)
            incident.mark("test")
            if found is None:
                self.refund()
                return False
            incident.tests += found.lines
            incident.diagnosis = machine_tests.accused(incident.diagnosis, found)
            if found.named:
                self.forgive()
            self._replacement.leave(found.idle, incident)
        return True

    def _tests_due(self, diagnosis: Diagnosis) -> bool:
        if not self._boss.config.stop_tests:
            return False
        return machine_tests.due(diagnosis, self.budget.failures, self._tested)

    async def _test(self, incident: Incident) -> machine_tests.Found | None:
        diagnosis = incident.diagnosis
        suspects = diagnosis.suspects or (diagnosis.root.node,)
        found = await self._boss.stop_tests.ask(suspects, diagnosis.symptom)
        if found is not None:
            self._tries += 1
            active = [node.name for node in self._boss.state.world.places]
            self._tested = machine_tests.conclusive(found, active) or self._tries >= TEST_TRIES
        return found

    def _replay_due(self, diagnosis: Diagnosis) -> bool:
        if not self._boss.config.replay:
            return False
        blamed = ladder.suspect_nodes(diagnosis, self.budget.nodes)
        return replaying.due(diagnosis, self.budget.failures, blamed, self._replayed)

    async def _replay(self, incident: Incident) -> machine_tests.Found | None:
        found = await self._boss.replay.dual_phase()
        self._replayed = self._replayed or found is not None
        return found
