"""Carry out one check: compute a step again on other nodes, compare, and act on the result."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.verify.recomputing import Recomputing
from srun_wrapper.checkpoints.verify.rules import (
    MISSED,
    ONE_NODE,
    UNEVEN,
    UNPROVEN,
    Results,
    compare,
    conclude,
)
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.machine_tests import MachineResults

Test = Callable[[Sequence[str], Symptom], Awaitable[MachineResults | None]]
Evict = Callable[[tuple[str, ...], Incident], None]
Outcome = Literal["agree", "program", "machine", "once", "proven", "unknown", "interrupted"]


class StateCheck:
    """Compares results of a step, and counts the checks in a row that came to nothing."""

    def __init__(
        self,
        state: JobState,
        recomputing: Recomputing,
        test: Test,
        evict: Evict,
        certificates: Certificates,
        journal: Journal,
    ) -> None:
        """``test``: test nodes after such a symptom; None if a failure or the end came in
        between."""
        self._state = state
        self._recomputing = recomputing
        self._test_nodes = test
        self._evict = evict
        self._certificates = certificates
        self._journal = journal
        self._missed = self._unproven = 0  # in a row
        self.off = ""
        """Reason why no more steps are to be checked in this job; empty while there is none."""

    async def run(self, step: int) -> Outcome:
        """Compute the step again, and act on the result. The ranks stand, or were stopped."""
        first = await self._recomputing.results(step)
        if not first:
            self._journal.news(f"step {step} is not checked: not all stores answered in time")
            return "unknown"
        base = await self._recomputing.base(step)
        here = list(self._state.world.places)
        other = self._recomputing.exchanged()
        if base is None or other is None:
            alone = len(here) + len(self._state.spares()) < 2
            why = UNEVEN if not alone else ONE_NODE
            self._miss(step, why if other is None else "no earlier step is in memory")
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
            say(f"step {step} has a different result on other nodes: {what}; recomputing it")
            third = await self._recomputing.again(step, base, here)
            if third is None:
                return "interrupted"
            found = conclude(first, second, third)
        if found == "agree":
            self._unproven = 0
            self._certificates.line.recomputed(step)
            return "agree"
        if found == "program":
            assert third is not None
            _, what = compare(first, third)
            self.off = (
                f"step {step} has a different result on the same nodes, too ({what}): the program "
                f"is not deterministic, and no node is blamed"
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
            self.off = f"the check failed {MISSED} times in a row: {why}"

    async def _test(
        self, step: int, other: Sequence[Node], outcome: Literal["machine", "once"]
    ) -> Outcome:
        """Test the machines of the first result after one that depends on the node, or came only
        once: all of them, since one wrong gradient is in the state of every rank. ``other``: those
        of the second result."""
        what = (
            f"step {step} depends on the node: two equal results on some nodes, another result "
            f"on others"
        )
        if outcome == "once":
            names = ",".join(node.name for node in self._state.world.places)
            what = (
                f"step {step} had a different result once, on {names}, and then the same result "
                f"twice, on other nodes and on these: a device computes wrongly intermittently"
            )
        say(f"{what}; it is not certified")
        if why := self._recomputing.hindrance():
            say(f"the machines are not tested now: {why}")
            return outcome
        self._unproven += outcome == "machine"
        if self._state.config.stop_tests:
            if not await self._recomputing.stop():
                return "interrupted"
            found = await self._test_nodes([n.name for n in self._state.world.places], "nan")
            if found is None:
                return "interrupted"
            self._report(found, (what, *found.lines), step)
            if found.named:
                return "proven"
            computed = {node.name for node in other}  # the second result
            if outcome == "machine" and not computed.isdisjoint(found.idle):
                self._unproven = 0
                return "proven"  # the ranks do not go on from that node's result
        if self._unproven >= UNPROVEN:
            self.off = (
                f"{UNPROVEN} times in a row the result depended on the node, and no test "
                f"names a faulty one"
            )
        else:
            say("no machine is proven faulty, so no node is evicted")
        return outcome

    def _report(self, found: MachineResults, lines: tuple[str, ...], step: int) -> None:
        """Evict bad nodes without ranks, as after a failure; one with ranks becomes a failure like
        any other, which waits for its recovery, and the newest states are in doubt."""
        at, named = time.monotonic(), tuple(found.named)
        if found.idle:
            root = Failure("differs", at, at, "", evidence=lines, step=step)
            diagnosis = Diagnosis("differs", "node", (), lines, "differs", root)
            number = self._state.incident_id(f"check-{step}")
            epoch = self._state.world.epoch
            self._evict(found.idle, Incident(number, epoch, diagnosis, at, at))
        if named:
            self._state.failures.append(
                Failure("differs", at, at, named[0], evidence=lines, suspects=named, step=step)
            )
