"""Compare the states that ranks share: if they differ, each rank saves all of its own."""

from __future__ import annotations

from robust_slurm.checkpoint.planning.alike import Comparison
from srun_wrapper.checkpoints.alarms import Notices
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.job.bus import Bus
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.protocol.checkpoint_messages import Saved, Unshare


class SharedStates:
    """Compares ranks that share a state: if they differ, it cannot be put together again."""

    def __init__(
        self,
        bus: Bus,
        enrolments: Enrolments,
        certificates: Certificates,
        journal: Journal,
        notices: Notices,
    ) -> None:
        self._bus = bus
        self._enrolments = enrolments
        self._certificates = certificates
        self._journal = journal
        self._notices = notices
        self._alike = Comparison()

    def begin(self) -> None:
        self._alike = Comparison()

    def compare(self, saved: Saved) -> None:
        """Compare a rank's checksums with its peers', and stop the sharing if they differ."""
        needs = self._enrolments.ranks[saved.rank].said.needs
        lowest = min(needs)  # of the group, and one of those that each needs
        if len(needs) < 2:
            return
        why = self._alike.add(lowest, saved.rank, saved.same)
        self._certificates.compared(saved.rank, saved.same, alike=not why)
        if not why:
            return
        self._alike.forget(lowest)
        said = {rank: each.said.needs for rank, each in self._enrolments.ranks.items()}
        group = tuple(sorted(r for r, of in said.items() if len(of) > 1 and min(of) == lowest))
        self._bus.broadcast(Unshare(group))
        self._journal.event("unshared", ranks=group, why=why)
        self._notices.once(
            f"checkpoints: ranks that shared their state no longer hold the same ({why}): each of "
            f"the {len(group)} ranks saves its whole state from now on",
            f"unshared {lowest}",
        )
