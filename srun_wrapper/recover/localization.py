"""Fault localization before the ladder decides: test the machines, or replay the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnosis import REPLAYED, TESTED, Diagnosis
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.state import JobState
from srun_wrapper.orders import machine_tests
from srun_wrapper.orders.machine_tests import MachineResults, StopTests
from srun_wrapper.replay import replaying
from srun_wrapper.replay.replaying import Replay

TEST_TRIES = 2  # in a row that told nothing: a third would not either


class FaultLocalization:
    """Looks for the machine at fault, with the ranks down; keeps the budget of failures."""

    def __init__(
        self,
        state: JobState,
        tests: StopTests,
        replay: Replay,
        stop_world: Callable[[Incident], Awaitable[bool]],
        evict: Callable[[tuple[str, ...], Incident], None],
    ) -> None:
        """``stop_world``: end all ranks, False if another failure came; ``evict``: given nodes."""
        self._state = state
        self._config = state.config
        self._machine_tests = tests
        self._job_replay = replay
        self._stop_world = stop_world
        self._evict = evict
        self.budget = ladder.Budget()
        self._tested = self._replayed = False  # since the last progress
        self._tries = 0  # of tests that told nothing

    def forgive(self) -> None:
        """Count failures anew: the job made progress, or the machine at fault was found."""
        self.budget.refill()
        self._tested = self._replayed = False
        self._tries = 0

    def refund(self) -> None:
        """Refund the attempt: nothing was tried, the next failure will be."""
        if all(f.symptom != "hang" for f in self._state.failures):
            self.budget.refund()

    async def find(self, incident: Incident) -> bool:
        """Put what is found into the incident; False if another failure or a signal came."""
        ways = (
            (self._tests_due, self._test, TESTED),
            (self._replay_due, self._replay, REPLAYED),
        )
        for due, ask, rule in ways:
            if self._state.vacant() or not due(incident.diagnosis):
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
            incident.diagnosis = machine_tests.with_bad_machines(incident.diagnosis, found, rule)
            if found.named:
                self.forgive()
            self._evict(found.idle, incident)
        return True

    def _tests_due(self, diagnosis: Diagnosis) -> bool:
        if not self._config.stop_tests:
            return False
        alike = self.budget.seen.get(diagnosis.signature, ())
        if diagnosis.cause == "user" and len(alike) > 1 and not self._state.progress.stepped:
            return False  # two nodes show what the program shows before its first step
        return machine_tests.due(diagnosis, self.budget.failures, self._tested)

    async def _test(self, incident: Incident) -> MachineResults | None:
        diagnosis = incident.diagnosis
        suspects = diagnosis.suspects or (diagnosis.root.node,)
        found = await self._machine_tests.ask(suspects, diagnosis.symptom)
        if found is not None:
            self._tries += 1
            active = [node.name for node in self._state.world.places]
            self._tested = machine_tests.conclusive(found, active) or self._tries >= TEST_TRIES
        return found

    def _replay_due(self, diagnosis: Diagnosis) -> bool:
        if not self._config.replay:
            return False
        blamed = ladder.suspect_nodes(diagnosis, self.budget.nodes)
        return replaying.due(diagnosis, self.budget.failures, blamed, self._replayed)

    async def _replay(self, incident: Incident) -> MachineResults | None:
        found = await self._job_replay.dual_phase()
        self._replayed = self._replayed or found is not None
        return found
