"""The plan that the ranks of a data process have named, from which the process makes steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError
from robust_slurm.data.named import plan_named
from robust_slurm.data.service.client import expect_code
from robust_slurm.data.service.readers.pool import ReaderPool
from robust_slurm.data.steps import LocalSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from robust_slurm.data.exchange.joining import Joining
    from robust_slurm.data.lanes.use import SourceUse
    from robust_slurm.data.plan import Plan


class NamedPlan:
    """The plan, for a world of ranks."""

    def __init__(self, plan: Plan, joining: Joining, use: SourceUse, readers: ReaderPool) -> None:
        self._plan, self._joining, self._use, self._readers = plan, joining, use, readers
        self._all = 0  # shares of a step
        self._alone = False

    def shares(self, rank: int, world: int, original: int) -> tuple[int, ...]:
        """Return the shares of a rank; ``original``: ranks at the job's beginning. Raises
        DataError."""
        number = self._plan.ranks(original).data
        if self._all not in (0, number):
            raise DataError(f"the ranks disagree: {self._all} shares of a step, or {number}")
        found = self._plan.shares(rank, world, original)
        self._all, self._alone = number, world == 1
        return found

    def steps(self, shares: Collection[int]) -> LocalSteps:
        """Begin to read for these shares. Raises DataError."""
        feeds, made = self._joining.feeds, self._readers.made
        return LocalSteps(self._plan, shares, self._all, feeds, self._alone, self._use, made)

    def identity(self) -> dict[str, Any]:
        return self._plan.identity()


def load(
    name: str, code: str, joining: Joining, use: SourceUse, waited: Callable[[], float]
) -> NamedPlan:
    """Import the plan. ``code``: what the rank has seen (``client.code_of``). ``use`` counts what
    steps take; ``waited``: as for ReaderPool. Raises whatever its module does, DataError if it is
    another now."""
    plan = plan_named(name)
    expect_code(name, code)
    plan.lanes()  # lists the sources' files
    readers = ReaderPool(plan, name, code, waited)
    joining.know(plan, f"{name} {code}", readers.open_feed)
    return NamedPlan(plan, joining, use, readers)
