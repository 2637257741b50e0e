"""The data of toy trainings: two corpora of integers, and a note of each step that is planned.

One record of each part is bad.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robust_slurm.data.plan import Plan
from robust_slurm.data.sources.base import Bad, Options, Part
from robust_slurm.data.sources.json_lines import jsonl

CORPUS = "TOY_CORPUS"
"""The variable with the directory of ``on_files``."""
STALLED = "TOY_STALLED"
"""And what it does when that does not answer."""
BAD = 9  # record of a part


class Numbers:
    """Documents of a few numbers, in parts. ``factor``: what decode makes of each number."""

    def __init__(self, first: int, factor: int = 1) -> None:
        self.first = first
        self.factor = factor
        self.options = Options(lanes=2, window=16, bad="skip")

    def parts(self) -> list[Part]:
        return [Part(f"{self.first}-{number}", 200, 200) for number in range(6)]

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
        for record in range(start, 200):
            if record == BAD:
                yield record, Bad(f"{self.first}-{part}", record, "made so")
                continue
            begin = self.first + 10_000 * part + 40 * record
            numbers = np.arange(begin, begin + 3 + (record * 7) % 30)
            yield record, {"tokens": self.factor * numbers}

    def fingerprint(self) -> str:
        return f"numbers from {self.first}"


CORPORA = [
    [
        first + 10_000 * part + 40 * record
        for part in range(6)
        for record in range(200)
        if record != BAD
    ]
    for first in (0, 1_000_000)
]
"""The first number of each document, by source."""


def checksum(batch: Mapping[str, Any]) -> int:
    return zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))


def mix(step: int) -> dict[str, float]:
    ahead = sys._getframe(1).f_code.co_filename.endswith("pool.py")  # for readers: no step is made
    if not ahead and (directory := os.environ.get("TOY_RECORDS")):
        with Path(directory, f"planned-{os.environ['SLURMD_NODENAME']}").open("a") as file:
            print(step, file=file)
    return {"web": 0.75, "code": 0.25}


def plan() -> Plan:
    sources = {"web": Numbers(0), "code": Numbers(1_000_000)}
    return Plan(sources, mix=mix, pack=64, batch=2, mesh={"dp": 6}, seed=7)


def version(factor: int, web: float) -> Plan:
    """Return the plan as one version of a user's code has it, for the job's ranks."""
    sources = {"web": Numbers(0, factor), "code": Numbers(1_000_000, factor)}
    return Plan(sources, mix={"web": web, "code": 1 - web}, pack=64, batch=2, seed=7)


def without_mesh() -> Plan:
    return version(1, 0.75)


def write_corpus(directory: Path) -> None:
    """Write what ``on_files`` reads: small documents, so that steps soon use up what is ahead."""
    directory.mkdir(parents=True)
    for name, first in ("web", 0), ("code", 1_000_000):
        for part in range(4):
            begins = (first + 100_000 * part + 40 * record for record in range(400))
            lines = (
                json.dumps({"tokens": list(range(begin, begin + 3 + (begin // 40) % 23))})
                for begin in begins
            )
            (directory / f"{name}-{part}.jsonl").write_text("\n".join(lines) + "\n")


def on_files() -> Plan:
    options = {"lanes": 2, "window": 16, "patience": 2.0, "stalled": os.environ[STALLED]}
    sources = {
        name: jsonl(f"{os.environ[CORPUS]}/{name}-*.jsonl", **options) for name in ("web", "code")
    }
    return Plan(sources, mix=mix, pack=64, batch=48, seed=7)
