"""The verdict on a run: the harm done to healthy nodes and to the job (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

COMPLETED, FAILED, CANCELLED, TIMEOUT = "completed", "failed", "cancelled", "timeout"
_ENDS = {"COMPLETED": COMPLETED, "FAILED": FAILED, "CANCELLED": CANCELLED, "TIMEOUT": TIMEOUT}


@dataclass(frozen=True, slots=True)
class Expected:
    """The right end of a case.

    `ends`: any of these. `bad`: nodes that are broken, so may be reported, excluded and drained.
    `gone`: nodes that were away for too long, so may be replaced, but not reported.
    """

    ends: Collection[str] = (COMPLETED,)
    bad: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    found: frozenset[str] = frozenset()
    """Nodes with a true fault: each must be reported or replaced."""
    flaps: frozenset[str] = frozenset()
    """Nodes that are cut off twice within 5 min: a report that says so stands (decision 0050)."""
    named: frozenset[str] | None = None
    """Nodes that must be the only suspects in the incidents' records, and about which nothing may
    be done; None: who is suspect besides is not judged."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations after a run."""

    state: str
    """The job's state in Slurm at its end, or at the deadline."""
    loss: float | None = None
    reference: float = 0.0
    reported: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    lost_twice: frozenset[str] = frozenset()
    """Reported nodes that were lost before and answered again, as the report says."""
    leftovers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files in memory and in /tmp, and processes, by node."""
    gap: float = 0.0
    """The longest time without a step, in seconds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one run."""

    end: str
    blamed: tuple[str, ...]
    """Healthy nodes that were reported, excluded, drained or replaced."""
    missed: tuple[str, ...]
    """Broken nodes that nothing was done about."""
    lost: str
    """The reason why a healthy job counts as lost; "": it was kept."""
    leftovers: tuple[str, ...]
    gap: float
    by_rule: frozenset[str] = frozenset()
    """Healthy nodes that were lost for a second time, and are reported for that."""

    @property
    def right(self) -> bool:
        """Report that nothing is wrong with the run."""
        return not (self.blamed or self.missed or self.lost or self.leftovers)


def judge(expected: Expected, seen: Observed) -> Verdict:
    """Compare a run with what is right."""
    blamed = seen.reported | seen.excluded | seen.drained
    by_rule = expected.flaps & seen.lost_twice
    wrongly = (blamed - expected.bad) | (seen.replaced - expected.bad - expected.gone)
    wrongly -= by_rule
    missed = expected.found - blamed - seen.replaced
    end = _ENDS.get(seen.state.split(" ")[0], seen.state.lower())
    lost = ""
    if end not in expected.ends:
        lost = f"{end} instead of {' or '.join(expected.ends)}"
    elif end == COMPLETED and seen.loss is None:
        lost = "completed without a result"
    elif end == COMPLETED and seen.loss != seen.reference:
        lost = f"loss {seen.loss} instead of {seen.reference}"
    left = tuple(f"{where}: {name}" for where, names in seen.leftovers.items() for name in names)
    return Verdict(
        end, tuple(sorted(wrongly)), tuple(sorted(missed)), lost, left, seen.gap, by_rule
    )


def longest_gap(times: Sequence[float], since: float) -> float:
    """Return the longest time between two steps, of which the later came after `since`."""
    return max((after - before for before, after in pairwise(times) if after >= since), default=0.0)
