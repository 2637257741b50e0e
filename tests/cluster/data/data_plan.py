"""The data of toy trainings: two corpora of integers, and a note of each step that is planned.

One record of each part is bad.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from robust_slurm.data.plan import Plan
from robust_slurm.data.sources.base import Bad, Options, Part

BAD = 9  # record of a part


class Numbers:
    """Documents of a few numbers, in parts."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.options = Options(lanes=2, window=16, bad="skip")

    def parts(self) -> list[Part]:
        return [Part(f"{self.first}-{number}", 200, 200) for number in range(6)]

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
        for record in range(start, 200):
            if record == BAD:
                yield record, Bad(f"{self.first}-{part}", record, "made so")
                continue
            begin = self.first + 10_000 * part + 40 * record
            yield record, {"tokens": np.arange(begin, begin + 3 + (record * 7) % 30)}

    def fingerprint(self) -> str:
        return f"numbers from {self.first}"


def mix(step: int) -> dict[str, float]:
    if directory := os.environ.get("TOY_RECORDS"):
        with Path(directory, f"planned-{os.environ['SLURMD_NODENAME']}").open("a") as file:
            print(step, file=file)
    return {"web": 0.75, "code": 0.25}


def plan() -> Plan:
    sources = {"web": Numbers(0), "code": Numbers(1_000_000)}
    return Plan(sources, mix=mix, pack=64, batch=2, mesh={"dp": 6}, seed=7)
