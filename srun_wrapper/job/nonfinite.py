"""Losses that are not finite: the failures that they cause, and the saved states in doubt."""

from __future__ import annotations

from collections.abc import Iterable

from robust_slurm.checkpoint.planning.sound import Bound
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.local_nan import LocalNan, Losses, locate
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
        self.first: int | None = None
        """The epoch's lowest step whose loss was not finite."""
        self._ranks: set[int] = set()
        self._until = 0  # every state saved after this step is from the new beginning

    def note(self, rank: Rank, epoch: int, now: float, good: float) -> Failure | None:
        """Return the failure that a rank's newest beat shows, once for each rank of an epoch.

        ``good``: when the rank was last known to be well.
        """
        if id(rank) in self._ranks or (rank.nan is None and rank.nonfinite_norms < NORMS):
            return None
        who = _name(rank)
        if rank.nan is not None:
            step, proven = rank.nan.step, rank.nan.proven
            if step is not None:
                self.first = step if self.first is None else min(step, self.first)
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
        """Note that training has reached this step."""
        if not self.since and step > self._until:
            self.bound, self._until = None, 0

    def outstanding(self, ranks: Iterable[Rank]) -> bool:
        """True if a rank has yet to report the first step whose loss was not finite."""
        first = self.first
        return first is not None and any(
            r.step is not None and r.step < first and r.exit is None and not r.ended for r in ranks
        )

    def local(self, ranks: Iterable[Rank]) -> LocalNan | None:
        """Return the ranks whose losses alone were not finite, if all others' are known."""
        if self.first is None:
            return None
        return locate([_losses(rank) for rank in ranks])

    def new_epoch(self) -> None:
        self.since = 0.0
        self.first = None
        self._ranks.clear()


def _name(rank: Rank) -> str:
    return f"rank {rank.rank}" if rank.rank >= 0 else f"local rank {rank.local}"


def _losses(rank: Rank) -> Losses:
    name, node = _name(rank), rank.node.name
    if rank.nan is not None:
        return Losses(name, node, rank.nan.step, rank.sound)
    known = rank.loss is not None and rank.loss - rank.loss == 0.0 and not rank.healed
    return Losses(name, node, None, rank.step if known else None)
