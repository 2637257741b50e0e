"""Steps are the same to the byte as before their making was made faster (decision 103)."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_files import FORMATS

from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.plan import Plan
from robust_slurm.data.sources.base import BadRecord
from robust_slurm.data.sources.json_lines import JsonLines, jsonl
from robust_slurm.data.sources.parquet_files import parquet
from robust_slurm.data.steps import LocalSteps, opener

ODD = [
    b'{"tokens": [1, 2]}', b"  ", b"{bad", b'{"tokens": []}', b'{"tokens": [1.0, 2]}', b"[1]",
    b'{"tokens": [1, true]}', b'{"tokens": [3], "x": "\xff"}', b'{"tokens": [3], "x": NaN}',
    b'{"tokens": [3], "tokens": [4, 5]}', b'{"tokens": [3e2]}', b'{"tokens": [3]} x',
    b'{"x": "\\ud800", "tokens": [8]}', b'{"tokens": 7}', b'{"tokens": "ab"}', b'{"tokens": {}}',
    b'{"tokens": [-2147483648, 2147483647]}', b'{"tokens": [2147483648]}', b'{"tokens": [[1]]}',
    b'{"tokens": [1], "tokens": null}', b'\xef\xbb\xbf{"tokens": [1]}', b'{"tok\\u0065ns": [9]}',
]  # fmt: skip
BEFORE = {
    ("jsonl", 1, 64): "16397905be125a74",
    ("jsonl", 1, None): "b149d19732abc34a",
    ("jsonl", 3, 64): "2d04fb502c847da9",
    ("jsonl", 3, None): "bf81b74e78561ca7",
    ("jsonl.zst", 1, 64): "16397905be125a74",
    ("jsonl.zst", 1, None): "b149d19732abc34a",
    ("jsonl.zst", 3, 64): "2d04fb502c847da9",
    ("jsonl.zst", 3, None): "bf81b74e78561ca7",
    ("tar", 1, 64): "ef90f1648be81d73",
    ("tar", 1, None): "b149d19732abc34a",
    ("tar", 3, 64): "180c57fc87cff594",
    ("tar", 3, None): "bf81b74e78561ca7",
    ("parquet", 1, 64): "988218e99a7e6923",
    ("parquet", 1, None): "9496b85a399e2b5d",
    ("parquet", 3, 64): "9d31ba25f127bf2c",
    ("parquet", 3, None): "7f67fae8c4f21e13",
    ("arrow", 1, 64): "16397905be125a74",
    ("arrow", 1, None): "b149d19732abc34a",
    ("arrow", 3, 64): "2d04fb502c847da9",
    ("arrow", 3, None): "bf81b74e78561ca7",
}
"""Digests of 30 steps by format, shares and pack, made by the code before it."""


def documents(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    lengths = [max(1, min(60, round(12 * draw.lognormvariate(0, 0.8)))) for _ in range(90)]
    return [{"tokens": [draw.randrange(60_000) for _ in range(n)]} for n in lengths]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "tar", "parquet", "arrow"])
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("pack", [64, None])
def test_steps_are_what_they_were(tmp_path: Path, form: str, shares: int, pack: int | None) -> None:
    make, write = FORMATS[form]
    for part in range(6):
        (tmp_path / f"{'ab'[part % 2]}-{part}.{form}").write_bytes(write(documents(part)))
    sources = {name: make(str(tmp_path / f"{name}-*.{form}"), lanes=2, window=16) for name in "ab"}
    plan = Plan(
        sources, mix={"a": 0.7, "b": 0.3}, cost=lambda meta: meta.tokens**2, pack=pack, batch=4
    )
    steps, found = LocalSteps(plan, range(shares), shares), hashlib.sha256()
    steps.seek(None)
    for _ in range(30):
        _, rows, _ = steps.next()
        for share in range(shares):
            for name, array in sorted(rows[share].items()):
                found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    steps.close()
    assert found.hexdigest()[:16] == BEFORE[form, shares, pack]


def test_the_quick_way_takes_no_record_that_the_other_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(ODD))
    source = jsonl(tmp_path / "a.jsonl", bad="skip")

    def told() -> list[object]:
        return [
            (index, values if values is None or isinstance(values, BadRecord) else
             [(name, array.dtype.str, array.tolist()) for name, array in values.items()])
            for index, values in source.read(0)
        ]  # fmt: skip

    quick = told()
    monkeypatch.setattr(JsonLines, "_at_once", lambda self, raw: None)
    assert told() == quick
    assert sum(isinstance(values, list) for _, values in quick) == 8  # type: ignore[misc]


def test_a_column_that_is_missing_or_unfit_is_a_bad_record(tmp_path: Path) -> None:
    rows = {"tokens": pa.array([[1, 2], [3]], pa.list_(pa.int32()))}
    days = pa.array([0, 10_000_000], pa.int32()).cast(pa.date32())  # the second is beyond 9999
    pq.write_table(pa.table({**rows, "day": days}), tmp_path / "a.parquet")
    both = parquet(tmp_path / "a.parquet", columns=["tokens", "day"])
    first, second = (values for _, values in both.read_quickly(0))
    assert isinstance(first, dict) and isinstance(second, BadRecord) and "day" in second.why
    ((_, found), *_) = parquet(tmp_path / "a.parquet", columns=["day"]).read_quickly(0)
    assert isinstance(found, BadRecord) and 'without "tokens"' in found.why


def test_what_a_closed_feed_has_given_is_given_back_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"tokens": [1, 2, 3]}\n' * 50)
    plan = Plan({"a": jsonl(tmp_path / "a.jsonl")}, pack=8, batch=2)
    budget = ReadBudget()
    feed = opener(plan)(("a", 0), budget)
    feed.seek(Position())
    feed.next()
    given = feed.ready()
    assert given is not None and sum(given.sizes) > 0
    feed.close()
    feed.give_back(sum(given.sizes))
    assert budget.used == 0
