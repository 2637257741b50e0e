"""The form of a check: each family is a module below ``health/checks`` with a constant CHECK.

docs/checks/README.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from health.finding import ActionName, Class, Finding, Status
from health.node.system import System

# When a check runs: before a job, after it, in the HealthCheckProgram, or only when somebody
# looks closer (a reported node, `robust-health check`).
Where = Literal["prolog", "epilog", "sweep", "deep"]
PLACES: tuple[Where, ...] = ("prolog", "epilog", "sweep", "deep")
EVERYWHERE = frozenset(PLACES)


class Setting(NamedTuple):
    """A key of the family's table in robust.toml: ``[health.<family>]``.

    A value from the file must have the type of ``default`` (an int may stand for a float); a
    list holds strings, a table maps strings to the type of its default's values.
    """

    default: Any
    help: str
    unit: str = ""


class Condition(NamedTuple):
    """One row of the family's table of conditions; its id is unique among all families."""

    check: str
    status: Status
    cls: Class
    action: ActionName
    when: str

    def found(
        self,
        evidence: str,
        device: str = "",
        *,
        status: Status | None = None,
        cls: Class | None = None,
        action: ActionName | None = None,
        uid: int = -1,
    ) -> Finding:
        """The finding of this condition."""
        return Finding(
            status or self.status,
            cls or self.cls,
            self.check,
            device,
            evidence,
            action or self.action,
            uid,
        )


class Check(NamedTuple):
    """A family of checks that look at the same source together.

    ``run`` returns its findings, an empty list when all is well; it never acts. An exception
    becomes an ERROR finding ``<name>-error`` of class tool, which closes the gate if
    ``closes_on_error``; overrunning ``deadline_s`` becomes a FAIL ``<name>-hung``, or a WARN if
    ``only_warns``. ``cost_ms`` is its duration on a healthy node.
    """

    name: str
    run: Callable[[System], list[Finding]]
    conditions: tuple[Condition, ...]
    settings: Mapping[str, Setting]
    where: frozenset[Where] = EVERYWHERE
    needs_nvml: bool = False
    closes_on_error: bool = True
    deadline_s: float = 2.0
    cost_ms: float = 1.0

    @property
    def only_warns(self) -> bool:
        """True if no finding of the check closes the gate, so that its silence must not either."""
        return bool(self.conditions) and all(row.status == "WARN" for row in self.conditions)
