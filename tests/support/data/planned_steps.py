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

    def head(self, source: str, lane: int) -> tuple[Meta, Position]:
        epoch, _, taken = self.at[source, lane]
        lengths = self.lengths[source][lane]
        last = taken + 1 == len(lengths)
        after = Position(epoch + 1) if last else Position(epoch, 0, taken + 1)
        return Meta(Ref(source, lane, epoch, lane, taken), lengths[taken]), after

    def take(self, source: str, lane: int, epoch: int) -> tuple[Meta, Position] | int:
        found = self.head(source, lane)
        if found[0].ref.epoch > epoch:
            return found[0].ref.epoch
        self.at[source, lane] = found[1]
        return found


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
