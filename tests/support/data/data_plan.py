"""The data of toy trainings: two corpora of integers, and a note of each step that is planned.

One record of each part is bad.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robust_slurm.data.plan import Plan
from robust_slurm.data.sources.base import BadRecord, SourceOptions, SourcePart
from robust_slurm.data.sources.json_lines import jsonl
from robust_slurm.data.sources.parquet_files import parquet

CORPUS = "TOY_CORPUS"
"""The variable with the directory of ``plan`` or ``on_files``."""
STALLED = "TOY_STALLED"
"""The variable with the policy of ``on_files`` when that directory does not answer."""
BAD = 9  # record of a part


class Numbers:
    """Documents of a few numbers, in parts. ``factor``: what decode makes of each number."""

    def __init__(self, first: int, factor: int = 1) -> None:
        self.first = first
        self.factor = factor
        self.options = SourceOptions(lanes=2, window=16, bad="skip")

    def parts(self) -> list[SourcePart]:
        return [SourcePart(f"{self.first}-{number}", 200, 200) for number in range(6)]

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        for record in range(start, 200):
            if record == BAD:
                yield record, BadRecord(f"{self.first}-{part}", record, "made so")
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


PARTS, RECORDS = 6, 200  # of each source of ``plan``
SLOW = 0.01  # s of a processor for a record, until there are readers


def write_files(directory: Path) -> None:
    """Write what ``plan`` reads: "web" in compressed JSON Lines, "code" in Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    directory.mkdir(parents=True)
    for name, first in ("web", 0), ("code", 1_000_000):
        for part in range(PARTS):
            begins = [first + 10_000 * part + 40 * record for record in range(RECORDS)]
            rows: list[list[int] | None]
            rows = [list(range(begin, begin + 3 + (begin // 40 * 7) % 30)) for begin in begins]
            rows[BAD] = None
            if name == "web":
                text = "".join(json.dumps({"tokens": row}) + "\n" for row in rows)
                file = directory / f"{name}-{part}.jsonl.zst"
                file.write_bytes(zstandard.compress(text.encode()))
            else:
                table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
                pq.write_table(table, directory / f"{name}-{part}.parquet")


_quick = "TOY_RECORDS" not in os.environ


def decode(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record's tokens; slowly, until readers decode on three nodes: so there are some."""
    global _quick
    if not _quick:
        directory = Path(os.environ["TOY_RECORDS"])
        if Path("/proc/self/comm").read_text() == "robust-reader\n":
            (directory / f"read-{os.environ['SLURMD_NODENAME']}").touch()
            _quick = True
        elif len(list(directory.glob("read-*"))) >= 3:
            _quick = True
        else:
            until = time.thread_time() + SLOW
            while time.thread_time() < until:
                pass
    if record["tokens"] is None:
        raise ValueError("made so")
    return {"tokens": record["tokens"]}


def plan() -> Plan:
    """Return a plan of which ranks r and r + 3 have the same rows."""
    folder, options = os.environ[CORPUS], {"lanes": 2, "window": 16, "bad": "skip"}
    sources = {
        "web": jsonl(f"{folder}/web-*.jsonl.zst", decode, **options),
        "code": parquet(f"{folder}/code-*.parquet", decode, **options),
    }
    return Plan(sources, mix=mix, pack=64, batch=4, mesh={"pp": 2, "dp": 3}, seed=7)


def version(factor: int, web: float, mesh: Mapping[str, int] | None = None) -> Plan:
    """Return the plan as one version of a user's code has it, for the job's ranks."""
    sources = {"web": Numbers(0, factor), "code": Numbers(1_000_000, factor)}
    return Plan(sources, mix={"web": web, "code": 1 - web}, pack=64, batch=2, mesh=mesh, seed=7)


def without_mesh() -> Plan:
    return version(1, 0.75)


def of_pipelines() -> Plan:
    return version(1, 0.75, {"pp": 2, "dp": 2})


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
