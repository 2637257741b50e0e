"""Jumps of the loss and of the gradient norm, against their own running medians (pure).

A jump by FACTOR is ByteRobust's fault signal (arXiv 2509.16293). Most such spikes heal, and one
that the program or its data cause comes again after a restart. So a jump is only reported, once it
has stayed: nothing is stopped for it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from srun_wrapper.job.model import Rank

FACTOR = 5.0
WINDOW = 64  # reported values from before the jump that make the median
LEAST = 16  # of them before a value is judged
STAYS = 20  # steps above FACTOR medians after which a jump is reported ...
STAYS_SEEN = 5  # ... and reported values: a rank is read a few times a second
NOBODY = 1 << 31  # above all ranks


class Spikes:
    """Loss and gradient norm of the job: those of the lowest rank that reports them."""

    def __init__(self) -> None:
        self._series = {"loss": Series("loss"), "grad_norm": Series("gradient norm")}
        self._last = NOBODY  # ranks above it do not count: they are skipped at once

    def note(self, rank: Rank) -> list[str]:
        """Take in the values of a rank's new beat; return the lines to report."""
        if not 0 <= rank.rank <= self._last or rank.step is None or rank.source != "explicit":
            return []
        values = ("loss", rank.loss), ("grad_norm", rank.grad_norm)
        found = [
            self._series[name].note(rank.rank, rank.step, value)
            for name, value in values
            if value is not None and value - value == 0.0
        ]
        self._last = max(series.rank for series in self._series.values())
        return [line for line in found if line]

    def new_epoch(self) -> None:
        """Forget jumps: training resumes from an earlier step, and sees them again."""
        for series in self._series.values():
            series.calm()


class Series:
    """One value of one rank. Values that have jumped do not enter the median."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.rank = NOBODY
        """The lowest rank that has reported the value: the one whose values count."""
        self._values = deque[float](maxlen=WINDOW)
        self._median = 0.0
        self._since: int | None = None  # step of the first value of a jump
        self._seen = 0  # values of it
        self._reported = False

    def calm(self) -> None:
        """Forget the jump that is on."""
        self._since, self._seen, self._reported = None, 0, False

    def note(self, rank: int, step: int, value: float) -> str:
        """Take a finite value; return a line where a jump has stayed, or is over; else ""."""
        if rank < self.rank:
            self.rank = rank
            self._values.clear()
            self.calm()
        if rank > self.rank:
            return ""
        usual = self._median
        if len(self._values) >= LEAST and 0.0 < FACTOR * usual < value:
            return self._above(step, value, usual)
        self._values.append(value)
        self._median = median(self._values)
        line = ""
        if self._reported:
            line = (
                f"{self._name} of rank {rank} is {value:.4g} at step {step}: less than "
                f"{FACTOR:g} times its median before step {self._since} again"
            )
        self.calm()
        return line

    def _above(self, step: int, value: float, usual: float) -> str:
        if self._since is None or step < self._since:
            self.calm()
            self._since = step
        self._seen += 1
        stays = step - self._since >= STAYS and self._seen >= STAYS_SEEN
        if self._reported or not stays:
            return ""
        self._reported = True
        return (
            f"warning: {self._name} of rank {self.rank} is more than {FACTOR:g} times its median "
            f"({usual:.4g}) since step {self._since}: {value:.4g} at step {step}. The job goes on; "
            f"if training diverges, stop it and resume from before step {self._since}"
        )
