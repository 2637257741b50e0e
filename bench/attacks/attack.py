"""An attack, and what it got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.attacks.room import Room

HOST, LAB = "host", "lab"
"""An attack runs in mount namespaces of its own, or in a lab that those of its kind share."""


@dataclass(frozen=True, kw_only=True)
class Got:
    """The outcome of an attack."""

    what: str
    """The outcome that was seen, in one line."""
    succeeded: bool = False
    drained: tuple[str, ...] = ()
    """Healthy nodes that were drained, or would have been."""
    silent: bool = False
    """The gate stood open, and said nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack by an unprivileged user."""

    name: str
    row: str
    """The kind: user code as root, drains, gate open, wire, files, words, clock."""
    tries: str
    """The attempt, in one line."""
    run: Callable[[Room], Got]
    where: str = HOST
    seconds: float = 60.0
    """An attack that takes longer proves nothing."""
