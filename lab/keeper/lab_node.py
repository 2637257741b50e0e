"""A node as the lab's keeper knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.errors import LabError
from lab.keeper.relay import Relay
from lab.machine.gear import Gear


@dataclass
class LabNode:
    """A node as the keeper knows it."""

    name: str
    number: int
    boots: int = 0
    pid: int = 0  # 0: crashed
    died: float = 0.0  # wall clock
    cut: bool = False
    slowed: bool = False
    relay: Relay | None = None
    stopped: bool = False
    paused: bool = False  # cut and stopped as one
    back_at: float = math.inf  # monotonic: the end of an outage or a pause
    daemons: dict[str, str] = field(default_factory=dict)  # name: frozen or stopped
    stopped_ranks: dict[int, int] = field(default_factory=dict)  # pid: pidfd
    gear: Gear | None = None  # None: the head

    @property
    def port(self) -> str:
        # A new name at each boot: the kernel removes the old port in its own time.
        return f"p{self.number}b{self.boots}"

    @property
    def state(self) -> str:
        if not self.pid:
            return "crashed"
        faults = [
            ("paused", self.paused),
            ("hung", self.stopped and not self.paused),
            ("rank-hung", bool(self.stopped_ranks)),
            ("cut", self.cut and not self.paused),
            ("slow", self.slowed or self.relay is not None),
        ]
        found = [name for name, on in faults if on]
        found += [f"{name}-{how}" for name, how in self.daemons.items()]
        return "+".join(found + (self.gear.faults if self.gear else [])) or "up"

    def must_run(self) -> None:
        """Raise LabError if the node is crashed."""
        if not self.pid:
            raise LabError(f"{self.name} is crashed already; `heal {self.name}` brings it back")


def find(nodes: Mapping[str, LabNode], name: str) -> LabNode:
    """Return the node of that name."""
    if name not in nodes:
        raise LabError(f"no node {name!r} here; there are: {' '.join(nodes)}")
    return nodes[name]
