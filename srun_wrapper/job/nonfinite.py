"""Losses that are not finite: the failures that they are, and the saved states in doubt."""

from __future__ import annotations

from robust_slurm.checkpoint.planning.sound import Bound
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.model import Rank

# With fp16 some gradients are infinite as a rule: GradScaler leaves the step out and halves its
# scale. From 2**16, where it starts, that cannot go on for more than so many steps.
NORMS = 20
UNPROVEN = 2  # steps; a norm at step s tells of a state saved as s or s - 1, see docs/heartbeat.md


class NonfiniteLosses:
    """The losses of the running epoch that were not finite; the bound outlives the epoch."""

    def __init__(self) -> None:
        self.bound: Bound | None = None
        """No later state may be used, except where it was saved after training began anew."""
        self.since = 0.0
        """Time of the epoch's first loss or norm that was not finite; 0.0: none."""
        self._ranks: set[int] = set()
        self._until = 0  # the step beyond which everything saved is of the new beginning

    def note(self, rank: Rank, epoch: int, now: float, good: float) -> Failure | None:
        """Return the failure that a rank's newest beat shows, once for each rank of an epoch.

        ``good``: when the rank was last known to be well.
        """
        if id(rank) in self._ranks or (rank.nan is None and rank.nonfinite_norms < NORMS):
            return None
        who = f"rank {rank.rank}" if rank.rank >= 0 else f"local rank {rank.local}"
        if rank.nan is not None:
            step, proven = rank.nan.step, rank.nan.proven
            what = f"loss of {who} on {rank.node.name} is {rank.nan.loss}"
        else:
            step, proven = rank.nonfinite_since, None
            what = f"gradient norm of {who} on {rank.node.name} was not finite {NORMS} times"
        self._ranks.add(id(rank))
        self.since = self.since or now
        if step is not None:
            what += f" at step {step}" if rank.nan is not None else f", from step {step} on"
            proven = step - UNPROVEN if proven is None else proven
            self._until = max(self._until, step)
        if proven is not None:
            known = proven if self.bound is None else min(proven, self.bound.step)
            self.bound = Bound(known, epoch)
        return Failure("nan", now, good, rank.node.name, rank.rank, evidence=(what,), step=step)

    def rewind(self, step: int, epoch: int, newest: int) -> None:
        """Training goes back to ``step``; what this epoch and older ones saved later, up to
        ``newest``, is not to be used."""
        known = step if self.bound is None else min(step, self.bound.step)
        self.bound, self._until = Bound(known, epoch), max(self._until, newest)

    def reached(self, step: int) -> None:
        """Training has come to this step."""
        if not self.since and step > self._until:
            self.bound, self._until = None, 0

    def new_epoch(self) -> None:
        self.since = 0.0
        self._ranks.clear()
