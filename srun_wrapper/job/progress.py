"""Progress of the job in steps, overall and since its last failure (pure)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

MOST_COUNTS = 2000  # times at which the steps made are remembered


@dataclass(slots=True)
class Progress:
    """Steps done so far, over all epochs."""

    best: int | None = None  # highest step completed by any rank, None without numbered steps
    beats: int = 0  # steps seen in this epoch by the rank that is furthest
    resume: int | None = None  # first step completed in this epoch
    numbered: bool = False  # step numbers come from the script, not from counting
    at_failure: int | None = None  # ``best`` at the last failure
    ceiling: int | None = None  # step of this epoch's first loss that was not finite
    beats_at_failure: int | None = None  # ``beats`` of the last failed epoch
    saved: int | None = None  # newest step that a rank has saved
    saved_at_failure: int | None = None
    stepped_before: bool = False  # in an earlier epoch
    first: int | None = None  # first step of the first epoch that had numbered ones
    counts: list[tuple[float, int]] = field(default_factory=list)
    """Steps seen in this epoch by the rank that is furthest, and since when so many were seen."""
    counts_at_failure: list[tuple[float, int]] = field(default_factory=list)

    def since_failure(self) -> bool:
        """True if the epoch that ends now brought the job further than the last failure.

        If steps are only counted (torch hook), the absolute step is unknown: the saved steps
        decide. Where none are saved, an epoch that ends after about as many steps as the one before
        it is taken to have failed at the same step.
        """
        if self.numbered:
            return self.best is not None and (
                self.at_failure is None or self.best > self.at_failure
            )
        if not self.beats:
            return False
        if self.saved is not None:
            return self.saved_at_failure is None or self.saved > self.saved_at_failure
        if self.beats_at_failure is None:
            return True
        return abs(self.beats - self.beats_at_failure) > max(2, self.beats_at_failure // 10)

    def counted(self, beats: int, at: float) -> None:
        """Note that so many steps of this epoch were done at a time (monotonic seconds)."""
        self.beats = beats
        if len(self.counts) >= MOST_COUNTS:
            del self.counts[1::2]
        spacing = (at - self.counts[0][0]) / MOST_COUNTS if self.counts else 0.0
        if not self.counts or at - self.counts[-1][0] >= spacing:
            self.counts.append((at, beats))

    def made_by(self, at: float) -> int:
        """Return how many steps of the last failed epoch were done by a time."""
        found = bisect_right(self.counts_at_failure, (at, 1 << 62))
        return self.counts_at_failure[found - 1][1] if found else 0

    def anew(self) -> bool:
        """True if this epoch began at the job's first step again although others had been made."""
        made, first = self.at_failure, self.first
        if not self.numbered or self.resume is None or made is None or first is None:
            return False
        return self.resume <= first < made

    def reached(self, step: int) -> bool:
        """Note that a rank has done this step; return True if no rank had come so far."""
        if self.ceiling is not None:
            step = min(step, self.ceiling)
        if self.best is not None and step <= self.best:
            return False
        self.best = step
        return True

    def not_finite(self, step: int | None) -> None:
        """Note that a loss is not finite at this step: steps beyond it are no progress."""
        if step is None:
            return
        self.ceiling = step if self.ceiling is None else min(step, self.ceiling)
        if self.best is not None:
            self.best = min(self.best, step)

    def failed(self) -> None:
        self.at_failure = self.best
        self.beats_at_failure = self.beats
        self.counts_at_failure = self.counts
        self.saved_at_failure = self.saved

    @property
    def stepped(self) -> bool:
        """True if a rank has made a step in this epoch or before."""
        return self.stepped_before or self.beats > 0

    def new_epoch(self) -> None:
        self.stepped_before = self.stepped
        self.first = self.resume if self.first is None else self.first
        self.counts = []
        self.beats = 0
        self.resume = None
        self.ceiling = None
