"""The imbalance of the ranks' work in a step: by our planner, and with rows packed as they come.

Pure: lengths alone, drawn from the corpus' distributions; the cost of a row is attention within its
documents, the sum of their lengths' squares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from bench.common import Results, summarise
from bench.data.corpus import MEDIANS, lengths
from bench.data.packing import PACK, arrival_rows
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.planning.planner import PlannedStep, Rules, next_step
from robust_slurm.data.planning.state import first_state
from robust_slurm.data.sample import Meta, Ref

ROWS = 8
SIZES = (8, 64)  # data-parallel ranks
MICRO = (2, 4)  # rows of a micro-batch, as a pipeline has them: those of a rank in their order
LANE = 1000  # documents of a pass
FILL = 0.98  # Plan's default


def imbalance(costs: Sequence[float]) -> float:
    """Return the largest over the mean; 1 is perfect."""
    total = float(sum(costs))
    return max(costs) * len(costs) / total if total else 1.0


class Lengths:
    """Sources of documents that have a length and nothing else."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.names = [f"s{number:02}" for number in range(2 * len(MEDIANS))]
        self._lengths = {
            name: lengths(chance, number, LANE) for number, name in enumerate(self.names)
        }
        self._at = dict.fromkeys(self.names, 0)

    def head(self, source: str, lane: int) -> Meta:
        epoch, record = divmod(self._at[source], LANE)
        return Meta(Ref(source, lane, epoch, 0, record), self._lengths[source][record])

    def take(self, source: str, lane: int, epoch: int) -> Meta | int:
        found = self.head(source, lane)
        if found.ref.epoch > epoch:
            return found.ref.epoch
        self._at[source] += 1
        return found

    def after(self, source: str, lane: int) -> Position:
        return Position(*divmod(self._at[source], LANE), 0)


def planned(ranks: int, steps: int, seed: int = 0) -> tuple[list[PlannedStep], list[float]]:
    """Return our steps, and how long each took to plan."""
    heads = Lengths(seed)
    weights = {name: (3.0, 1.0)[number % 2] for number, name in enumerate(heads.names)}
    rules = Rules(
        mix=lambda step: weights,
        cost=lambda meta: meta.tokens**2,
        pack=PACK,
        long="split",
        fill=FILL,
        batch=ROWS,
        shares=ranks,
        epochs=None,
    )
    state = first_state(dict.fromkeys(heads.names, 1))
    made, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        step = next_step(rules, state, heads)
        seconds.append(time.perf_counter() - began)
        assert isinstance(step, PlannedStep)
        made.append(step)
        state = step.state
    return made, seconds


def arrived(steps: list[PlannedStep], ranks: int) -> list[list[list[list[int]]]]:
    """Return the same documents in rows as they come, by step and rank; a rest is left out."""
    rows = arrival_rows([meta.tokens for step in steps for meta in step.drawn])
    each = ranks * ROWS
    return [
        [rows[at + ROWS * rank : at + ROWS * (rank + 1)] for rank in range(ranks)]
        for at in range(0, len(rows) - each + 1, each)
    ]


def measure(results: Results, name: str, steps: list[list[list[list[int]]]]) -> None:
    """Add the imbalance of ranks, of micro-batches and of rows, the least that the rows' can be
    (one row has the longest piece), and which part of the tokens is no padding."""
    by_rank, by_row, used, dearest = [], [], [], []
    by_micro: dict[int, list[float]] = {size: [] for size in MICRO}
    for step in steps:
        rows = [sum(n * n for n in row) for rank in step for row in rank]
        by_rank.append(imbalance([sum(sum(n * n for n in row) for row in rank) for rank in step]))
        by_row.append(imbalance(rows))
        for size, found in by_micro.items():
            costs = [sum(rows[at : at + size]) for at in range(0, len(rows), size)]
            found.append(imbalance(costs))
        longest = max(n for rank in step for row in rank for n in row)
        dearest.append(longest**2 * len(rows) / sum(rows))
        used.append(sum(n for rank in step for row in rank for n in row) / (len(rows) * PACK))
    for what, values in (("ranks", by_rank), ("rows", by_row), ("rows_least", dearest)):
        results.metrics[f"{name}.{what}"] = summarise(values, "max/mean")
    for size, found in by_micro.items():
        results.metrics[f"{name}.micro_{size}"] = summarise(found, "max/mean")
    results.metrics[f"{name}.used"] = summarise(used, "of the tokens")


def balance(results: Results) -> None:
    """Plan, and pack as they come, the same documents for 8 and 64 ranks."""
    steps = results.runs or (5 if results.quick else 40)
    for ranks in SIZES:
        ours, seconds = planned(ranks, steps)
        rows = [
            [[[meta.tokens for meta in row] for row in share] for share in step.rows]
            for step in ours
        ]
        case = f"balance_{ranks}"
        measure(results, f"{case}.ours", rows)
        measure(results, f"{case}.arrival", arrived(ours, ranks))
        results.metrics[f"{case}.plan_s"] = summarise(seconds, "s")
        results.ratio(f"{case}.arrival/ours", f"{case}.arrival.ranks", f"{case}.ours.ranks")
    results.settings["cost"] = "sum of the squares of a row's documents' lengths"
