"""Steps planned from lanes of listed lengths."""

from __future__ import annotations

import random
from typing import Any

from robust_slurm.data.lanes.position import Position
from robust_slurm.data.planning.planner import NoStep, PlannedStep, Rules, next_step
from robust_slurm.data.planning.state import PlanState, first_state
from robust_slurm.data.sample import Meta, Ref


class Listed:
    """Lanes of lists of lengths, over and over."""

    def __init__(self, lengths: dict[str, list[list[int]]], state: PlanState) -> None:
        self.lengths = lengths
        self.at = {(n, i): p for n, s in state.sources.items() for i, p in enumerate(s.lanes)}

    def head(self, source: str, lane: int) -> Meta:
        epoch, _, taken = self.at[source, lane]
        return Meta(Ref(source, lane, epoch, lane, taken), self.lengths[source][lane][taken])

    def take(self, source: str, lane: int, epoch: int) -> Meta | int:
        found = self.head(source, lane)
        at, _, taken = self.at[source, lane]
        if at > epoch:
            return at
        last = taken + 1 == len(self.lengths[source][lane])
        self.at[source, lane] = Position(at + 1) if last else Position(at, 0, taken + 1)
        return found

    def after(self, source: str, lane: int) -> Position:
        return self.at[source, lane]


def rules(**other: Any) -> Rules:
    given_ = {
        "mix": lambda _: {"a": 1, "b": 1}, "cost": lambda meta: meta.tokens**2, "pack": 64,
        "long": "split", "fill": 1.0, "batch": 2, "shares": 3, "epochs": None,
    }  # fmt: skip
    return Rules(**{**given_, **other})


def run(
    own: Rules, lengths: dict[str, list[list[int]]], steps: int, begin: PlanState | None = None
) -> list[PlannedStep]:
    state = begin or first_state({name: len(lanes) for name, lanes in lengths.items()})
    heads, found = Listed(lengths, state), []
    for _ in range(steps):
        step = next_step(own, state, heads)
        if isinstance(step, NoStep):
            break
        found.append(step)
        state = step.state
    return found


def lanes_of(seed: int, lanes: int, each: int, most: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(1, most) for _ in range(each)] for _ in range(lanes)]
