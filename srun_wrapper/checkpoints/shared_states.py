"""Compare the states that ranks share: name a rank whose state was spoilt, or stop the sharing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from robust_slurm.checkpoint.planning.alike import Comparison, Outcome
from srun_wrapper.checkpoints.alarms import Notices
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.checkpoints.odd_ranks import COMMIT, Agreement, OddRank, judge
from srun_wrapper.checkpoints.schedule import Schedule
from srun_wrapper.decide.diagnosis import Cause
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import Saved, Unshare

Acquitted = Callable[[tuple[str, ...], str, Cause], None]

AT_ONCE = "ranks on several nodes differ at once: no machine is to blame"


class SharedStates:
    """Compares ranks that share a state: if they differ, it cannot be put together again.

    A rank that differs alone, and at two steps, makes the training go back.
    """

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        certificates: Certificates,
        schedule: Schedule,
        journal: Journal,
        notices: Notices,
    ) -> None:
        self._state = state
        self._enrolments = enrolments
        self._certificates = certificates
        self._schedule = schedule
        self._journal = journal
        self._notices = notices
        self.on_acquitted: Acquitted = lambda _nodes, _why, _cause: None
        self._before: list[OddRank] = []  # in this job
        self._members: Mapping[int, tuple[int, ...]] = {}  # of each group, by its lowest rank
        self._enrolled = -1  # when these were found
        self._on_disk = 0  # the newest step that is, 0: none is known
        self.begin(0)

    def begin(self, step: int, *, from_memory: bool = False) -> None:
        """Begin an epoch that resumes at ``step``; 0: from nothing, or from an unknown step."""
        self._alike = Comparison()
        self._groups: dict[int, Agreement] = {}
        self._from = step
        if not from_memory:
            self._on_disk = step
        elif self._on_disk > step:
            self._on_disk = 0
        self._named = False  # True once a rank of this epoch was named as the odd one

    def committed(self, step: int) -> None:
        """Note a step that is on disk, and at which all ranks that share a state held the same."""
        self._on_disk = max(self._on_disk, step)

    def anew(self) -> None:
        """Ranks begin anew within the epoch (torchrun), at an earlier step than was reported."""
        if self._named:
            return  # training goes back in any case
        if any(each.first for each in self._groups.values()):
            self._certificates.unsuspect()
        self._alike, self._groups, self._from = Comparison(), {}, 0

    def compare(self, saved: Saved) -> None:
        """Compare a rank's checksums with its peers', and stop the sharing if several differ."""
        needs = self._enrolments.ranks[saved.rank].said.needs
        lowest = min(needs)  # of the group, and one of those that each needs
        if len(needs) < 2:
            return
        found = self._alike.add(lowest, self._group(lowest), saved.rank, saved.same)
        differ = min((each.step for each in found if each.differ), default=None)
        self._certificates.compared(saved.rank, saved.same, differ)
        group, now = self._groups.setdefault(lowest, Agreement()), time.monotonic()
        doubted = group.first
        if any(group.take(each, now) for each in found):
            self._unshare(lowest, group.why)
            return
        if group.first is not None and doubted is None:
            self._doubt(lowest, group, now)
        if group.whole is not None:
            for each in self._before:
                each.passed |= each.rank in self._group(lowest) and group.whole > each.step

    def look(self, now: float) -> None:
        """Name a rank that differs alone, once that is sure."""
        for lowest, group in list(self._groups.items()):
            if group.expired(now):
                self._unshare(lowest, group.why)
            elif group.first is not None and not group.behind:
                self._doubt(lowest, group, now)
        apart = {lowest: group for lowest, group in self._groups.items() if group.since}
        confirmed = {
            lowest: group for lowest, group in apart.items() if group.confirmed and group.behind
        }
        if self._named or not confirmed or any(each.first is None for each in apart.values()):
            return
        nodes = {self._node(g.first.odd) for g in apart.values() if g.first}
        if len(nodes) > 1:
            for lowest, group in apart.items():
                self._unshare(lowest, f"{group.why}; {AT_ONCE}")
            return
        self._judge(*next(iter(confirmed.items())))

    def _judge(self, lowest: int, group: Agreement) -> None:
        first, again = group.first, group.confirmed
        if first is None or again is None or first.odd is None:
            return
        rank, node = first.odd, self._node(first.odd)
        held = [r for r in self._enrolments.here if self._node(r) == node]
        others = [r for r in self._group(lowest) if r != rank]
        at = time.monotonic()
        found = judge(self._before, rank, node, held, [self._node(r) for r in others], at)
        evict = found.verdict == "node"
        self._before.append(OddRank(rank, node, first.step, evict, at=at))
        if found.acquitted:
            self.on_acquitted(found.acquitted, found.why, "user")
        line = (
            f"rank {rank} on {node} held other bits than the {len(others)} ranks that share its "
            f"state, which agree, at steps {first.step} and {again.step}; all agreed at step "
            f"{group.behind}"
        )
        if found.verdict in ("program", "unclear"):
            self._unshare(lowest, f"{line}; {found.why}")
            return
        self._named = True
        evidence = (line, found.why) if found.why else (line,)
        self._state.failures.append(
            Failure(
                "sdc",
                at,
                at,
                node,
                rank,
                evidence=evidence,
                suspects=(node,),
                step=first.step,
                again=evict,
            )
        )
        self._state.changed.set()

    def _doubt(self, lowest: int, group: Agreement, now: float) -> None:
        """Ask for a second comparison, and have a recovery meanwhile go back before the first.

        A step from before that is on its way to disk is waited for.
        """
        if (first := group.first) is None:
            return
        group.behind = self._behind(group, first)
        if group.behind:
            self._certificates.suspect(group.why, group.behind)
            self._schedule.durable.hurry(now)
        elif self._schedule.unwritten(first.step):
            group.written = now
        elif not group.written or now - group.written > COMMIT:
            where = f"rank {first.odd} on {self._node(first.odd)} differs from all others"
            self._unshare(lowest, f"{group.why}; {where}, and no step from before is on disk")

    def _behind(self, group: Agreement, first: Outcome) -> int:
        """Return the newest step that is known to be from before; 0: none is on disk."""
        if not 0 < self._on_disk < first.step:
            return 0
        return max(group.whole or self._from, self._on_disk)

    def _unshare(self, lowest: int, why: str) -> None:
        self._alike.forget(lowest)
        self._groups.pop(lowest, None)
        if not self._named and not any(each.first for each in self._groups.values()):
            self._certificates.unsuspect()
        if not (ranks := self._group(lowest)):
            return
        self._state.bus.broadcast(Unshare(ranks))
        self._journal.event("unshared", ranks=ranks, why=why)
        self._notices.once(
            f"checkpoints: ranks that shared their state no longer hold the same ({why}): each of "
            f"the {len(ranks)} ranks saves its whole state from now on",
            f"unshared {lowest}",
        )

    def _group(self, lowest: int) -> tuple[int, ...]:
        if self._enrolled != self._enrolments.count:
            self._enrolled = self._enrolments.count
            self._members = self._find_groups()
        return self._members.get(lowest, ())

    def _find_groups(self) -> Mapping[int, tuple[int, ...]]:
        """Return the ranks of each group: those that keep parts, and all that need these."""
        found: dict[int, set[int]] = {}
        for rank, each in self._enrolments.ranks.items():
            needs = each.said.needs
            if len(needs) > 1:
                found.setdefault(min(needs), {rank}).update((rank, *needs))
        return {lowest: tuple(sorted(ranks)) for lowest, ranks in found.items()}

    def _node(self, rank: int | None) -> str:
        enrolled = self._enrolments.ranks.get(-1 if rank is None else rank)
        return enrolled.at.node.name if enrolled is not None else ""
