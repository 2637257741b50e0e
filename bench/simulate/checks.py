"""Goals of the simulator: what it found beside what was measured."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Check(NamedTuple):
    """``found`` must be within ``limit`` of ``wanted``, or at least that.

    ``points``: both are shares and the limit is a difference of them, else a share of ``wanted``.
    ``judged``: False for what is only printed.
    """

    name: str
    found: float
    wanted: float
    limit: float = 0.0
    points: bool = False
    at_least: bool = False
    judged: bool = True

    @property
    def difference(self) -> float:
        """Return the difference, in the limit's own measure."""
        apart = self.found - self.wanted
        return apart if self.points or self.at_least else apart / self.wanted

    @property
    def fine(self) -> bool:
        """True if the goal is met, or there is none."""
        if not self.judged:
            return True
        return self.difference >= 0.0 if self.at_least else abs(self.difference) <= self.limit

    @property
    def said(self) -> str:
        """The check as one line."""
        unit = " points" if self.points or self.at_least else " %"
        goal = "at least that" if self.at_least else f"within {100 * self.limit:g}{unit}"
        goal = goal if self.judged else "not judged"
        return (
            f"{self.name}: {self.found:.4g}, wanted {self.wanted:.4g} ({goal}); "
            f"difference {100 * self.difference:+.2f}{unit}"
        )


def show(checks: list[Check]) -> None:
    """Print all checks."""
    table = Table(title="held against what was measured")
    for title in ("", "check"):
        table.add_column(title)
    for check in checks:
        table.add_row(
            "met" if check.fine and check.judged else "" if check.fine else "MISSED", check.said
        )
    Console(width=140).print(table)
