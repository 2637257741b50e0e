"""Certify steps: find the saved states that are known to be good beyond their digests.

A state is certified when a finite loss was computed from it and the ranks that hold the same state
were seen to hold the same bits.
Memory's states are known here alone; those on disk bear marks, which outlive the job.
Why so: docs/decisions/0035-certified-steps.md.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

from robust_slurm.checkpoint.durable import marks
from robust_slurm.checkpoint.durable import tier as tier
from robust_slurm.checkpoint.durable.files import DurableError
from robust_slurm.checkpoint.durable.marks import Mark
from robust_slurm.checkpoint.planning.alike import is_whole
from robust_slurm.checkpoint.planning.plan import Holder
from robust_slurm.checkpoint.planning.sound import Bound, Trust
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.machine_tests import SLOW
from srun_wrapper.run_in_thread import run_in_thread

WRITE = 5.0  # s for the shared file system to take marks
_EPOCH = re.compile(r"\.e(\d{1,15})(?:-\d{1,18})?$")  # of ``Snapshot.attempt``
COMPARED = 64  # steps whose comparison is remembered; memory holds 3


def spoils(diagnosis: Diagnosis) -> str:
    """Reason why the newest states may be spoiled after this failure; empty if it gives none.

    A machine that is only slow has computed nothing wrong.
    """
    if diagnosis.symptom == "nan":
        return "a loss was not finite"
    if diagnosis.symptom == "sdc":
        return "a rank's state was spoilt"
    evidence = [line for line in diagnosis.evidence if "active-" in line or "replay" in line]
    wrong = not evidence or any(not SLOW.search(line) for line in evidence)
    if diagnosis.proven and wrong:
        return f"{', '.join(diagnosis.proven)} computed wrongly"
    return ""


class Timeline:
    """The timeline that the training is on, with the facts known of its states. No I/O.

    An epoch that resumes at step r abandons all later states of the epochs before it.
    """

    def __init__(self) -> None:
        self.proven: int | None = None
        """Newest step that a finite loss was computed from; older ones are finite too."""
        self.sharers = 0
        """Ranks that hold the same state as others, so that it can be compared."""
        self._floor: int | None = None  # ``proven`` when the epoch began
        self._alike: dict[int, set[int]] = {}  # step -> sharers that held what their peers did
        self._differed: int | None = None  # the first step that was not
        self._begun: list[tuple[int, int]] = []  # (epoch, step it resumed)

    def begin(self, epoch: int, step: int) -> None:
        """Begin an epoch that resumes at ``step``; 0: from nothing, or from an unknown step."""
        self.proven = min(self.proven, step) if self.proven is not None and step else None
        self._floor = self.proven
        self._alike = {at: ranks for at, ranks in self._alike.items() if at <= step}
        if self._differed is not None and self._differed > step:
            self._differed = None
        self._begun.append((epoch, step))

    def prove(self, tellers: Iterable[int], bound: int | None) -> None:
        """Update ``proven``. ``tellers``: the newest step with a finite loss, of each rank that
        reports losses; ``bound``: of a loss of this epoch that is not finite."""
        proven = min(tellers, default=None)
        if bound is not None:
            proven = bound if proven is None else min(proven, bound)
        if proven is not None:
            self.proven = proven if self._floor is None else max(proven, self._floor)

    def alike(self, step: int, rank: int) -> None:
        """Note that a sharer held the same bytes as those of its peers that are known so far."""
        self._alike.setdefault(step, set()).add(rank)
        if len(self._alike) > COMPARED:
            del self._alike[min(self._alike)]

    def differ(self, step: int) -> None:
        """Note that sharers do not hold the same, from ``step`` on at the latest.

        Nothing after it is certified: they may go on apart, and one of them is wrong.
        """
        self._differed = step if self._differed is None else min(step, self._differed)

    def mark(self, step: int) -> Mark:
        """Return the mark of a step on this line."""
        finite = self.proven is not None and step <= self.proven
        if self._differed is not None and step >= self._differed:
            return Mark(finite, False)
        equal = len(self._alike.get(step, ())) >= self.sharers
        return Mark(finite, equal if self.sharers else None)

    def covers(self, step: int, epoch: int) -> bool:
        """True if the state that an epoch saved as this step is certified."""
        return self.holds(step, epoch) and self.mark(step).certified

    def holds(self, step: int, epoch: int) -> bool:
        """True if what an epoch saved as this step is on the line: no later epoch left it out."""
        return all(step <= start for begun, start in self._begun if begun > epoch)


class Certificates:
    """Keeps the line up to date and the marks on disk."""

    def __init__(self, state: JobState, enrolments: Enrolments, journal: Journal) -> None:
        self._state = state
        self._enrolments = enrolments
        self._journal = journal
        self.suspicion = ""
        """Reason why the newest states may be spoiled, until an epoch resumes; see ``Trust``."""
        self._suspected = ""  # the reason of ``suspect``
        self._behind: int | None = None
        self.line = Timeline()
        self.newest: int | None = None
        """Newest certified step on disk."""
        self._open: set[int] = set()  # durable steps on the line that bear no mark yet
        self._from = 0  # the step that the epoch resumes at
        self._epoch = 0  # as begun; a replay's epochs prove nothing of the job's states
        self._writing: asyncio.Task[None] | None = None
        self._failed = False

    def begin(self, epoch: int, step: int) -> None:
        """Begin an epoch; see ``Timeline.begin``."""
        self.trust_again()  # restoring may have given up before it did
        self.line.begin(epoch, step)
        self._epoch = epoch
        self._open = {at for at in self._open if at <= step}
        if self.newest is not None and self.newest > step:
            self.newest = None
        self._from = step

    def resumed(self, step: int) -> None:
        """Note the step that ranks took, which may be older than the one they were given."""
        if step < self._from:
            self.begin(self._epoch, step)

    def durable(self, step: int) -> None:
        """Note that a step was committed."""
        self._open.add(step)

    def compared(self, rank: int, checksums: Sequence[tuple[int, int]], differ: int | None) -> None:
        """Note how a sharer's checksums (step, checksum) compare with those of its peers.

        ``differ``: the first step at which sharers differ, if they do.
        """
        if differ is not None:
            self.line.differ(differ)
        for step, checksum in checksums:
            if is_whole(checksum) and (differ is None or step < differ):
                self.line.alike(step, rank)

    def suspect(self, why: str, behind: int) -> None:
        """Have the next recovery go back to a certified step, or if there is none to one that is
        not after ``behind``; 0: no such step is known."""
        self.suspicion = self._suspected = why
        self._behind = behind or None

    def unsuspect(self) -> None:
        """Take back ``suspect``, and no reason that a recovery has given since."""
        if self.suspicion == self._suspected:
            self.suspicion = ""
        self._suspected, self._behind = "", None

    def trust_again(self) -> None:
        """Forget all suspicion: an epoch resumes."""
        self.suspicion, self._suspected, self._behind = "", "", None

    def bound(self) -> Bound | None:
        """Return the last state that is known to be sound, where newer ones are in doubt."""
        bound, behind = self._state.nonfinite.bound, self._behind
        if behind is None or (bound is not None and bound.step <= behind):
            return bound
        return Bound(behind, self._state.world.epoch)

    def look(self, now: float) -> None:
        """Mark the steps that have become certified since the last call."""
        self._prove()
        ready = sorted(step for step in self._open if self.line.mark(step).certified)
        if ready and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self.mark(*ready))

    def trust(self, places: Sequence[Holder], on_disk: Sequence[tier.DurableStep]) -> Trust:
        """Return the trust that the planner works with."""
        self._prove()
        held = {(h.step, h.epoch) for place in places for h in place.holdings}
        known = {step for step in self._open if self.line.mark(step).certified}
        return Trust(
            {key for key in held if self.line.covers(*key)},
            {
                c.step
                for c in on_disk
                if c.mark.certified or (c.step in known and self._holds(c.step, c.attempt))
            },
            {c.step for c in on_disk if c.mark.doubt},
            self.suspicion,
        )

    async def doubt(self, on_disk: Sequence[tier.DurableStep], after: int, why: str) -> None:
        """Mark the durable steps after ``after``: no later recovery may take one for good."""
        later = [c for c in on_disk if c.step > after and not c.mark.doubt]
        if later:
            found = [(c.step, c.mark._replace(doubt=why)) for c in later]
            await self._write(found, {c.step: c.attempt for c in later})

    def _holds(self, step: int, attempt: str) -> bool:
        """False for a step of an epoch that was left before it: its commit ended late."""
        epoch = _EPOCH.search(attempt)
        return epoch is None or self.line.holds(step, int(epoch[1]))

    def _prove(self) -> None:
        state = self._state
        if state.world.epoch != self._epoch:
            return
        ranks = (*state.world.by_rank.values(), *state.world.inner.values())
        bound = (
            state.nonfinite.bound.step if state.nonfinite.since and state.nonfinite.bound else None
        )
        self.line.prove((r.proven for r in ranks if r.proven is not None), bound)
        enrolled = self._enrolments.ranks.values()
        self.line.sharers = sum(len(each.said.needs) > 1 for each in enrolled)

    async def mark(self, *steps: int) -> None:
        """Mark those of the durable steps that are certified."""
        self._open.difference_update(steps)
        found = [(step, self.line.mark(step)) for step in steps]
        await self._write([(step, mark) for step, mark in found if mark.certified], {})

    async def _write(self, found: Sequence[tuple[int, Mark]], attempts: dict[int, str]) -> None:
        """Write marks. ``attempts``: the attempt of each step; else the one committed now."""
        directory = self._enrolments.directory
        if not found:
            return

        def work() -> list[tuple[int, str]]:
            done = []
            for step, mark in found:
                path = tier.step_dir(directory, step)
                try:
                    attempt = attempts.get(step) or tier.read_manifest(path).attempt
                    if mark.certified and not self._holds(step, attempt):
                        continue
                    marks.write(path, attempt, mark)
                except FileNotFoundError:
                    continue  # a newer step has taken its place
                except DurableError:
                    continue
                done.append((step, attempt))
            return done

        try:
            done = await run_in_thread(work, WRITE)
        except (OSError, TimeoutError) as err:
            if not self._failed:
                self._failed = True
                why = str(err) or "no answer"
                say(
                    f"checkpoints: cannot mark certified steps in {directory}: {why}; "
                    "later jobs will not know which steps are certified"
                )
            return
        for step, attempt in done:
            mark = dict(found)[step]
            if mark.certified:
                self.newest = max(step, self.newest or 0)
            self._journal.event("mark", step=step, attempt=attempt, **mark._asdict())
