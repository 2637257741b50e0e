"""The machines of a side: four that run, and one lost and one repaired every now and then."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lab import Lab

RUNNING = 4


@dataclass(slots=True)
class Schedule:
    """``every``: seconds from a loss to the next, ``repair``: until another machine is there."""

    seconds: float
    every: float
    repair: float

    def losses(self) -> list[float]:
        """Return the seconds after the start at which one is lost; the last one is repaired."""
        count = int((self.seconds - self.repair) // self.every)
        return [self.every * number for number in range(1, count + 1)]


@dataclass(slots=True)
class Site:
    """``fresh``: names of machines that are drained until one is needed. ``lost``: those lost."""

    lab: Lab
    fresh: list[str]
    repaired: Callable[[str], None] = lambda _node: None
    running: list[str] = field(default_factory=lambda: [f"n{n}" for n in range(1, RUNNING + 1)])
    lost: list[str] = field(default_factory=list)

    def drain_fresh(self) -> None:
        """Take the machines that come later out of Slurm's hands."""
        self._update(",".join(self.fresh), "drain", "reason=later")

    def run(self, schedule: Schedule, stop: threading.Event) -> None:
        """Lose machines in turn and bring others, until the time is over."""
        began, fresh = time.monotonic(), iter(self.fresh)
        events = [(at, "lose") for at in schedule.losses()]
        events += [(at + schedule.repair, "bring") for at in schedule.losses()]
        places = itertools.cycle(range(1, RUNNING))  # not the batch host: that is another case
        for at, what in sorted(events):
            if stop.wait(max(0.0, began + at - time.monotonic())):
                return
            if what == "lose":
                place = next(places)
                self.lost.append(self.running[place])
                self.lab.crash(self.running[place])
            else:
                self.running[place] = node = next(fresh)
                self._update(node, "resume")
                self.repaired(node)
        stop.wait(max(0.0, began + schedule.seconds - time.monotonic()))

    def _update(self, nodes: str, state: str, *more: str) -> None:
        words = ["scontrol", "update", f"nodename={nodes}", f"state={state}", *more]
        self.lab.exec("head", words, user=False, check=True)
