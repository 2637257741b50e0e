"""Single values that cannot be had, and servers that give no answer for a while: bad records are
those of one row, and what may be over later is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_files import FORMATS

from robust_slurm.data import arrow, jsonl, parquet
from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes import lane as lanes
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.sources import parquet_files
from robust_slurm.data.sources.base import Bad

BAD = {3: "column text", 7: "column made"}


def table() -> pa.Table:
    texts = [b"\xff" if row == 3 else b"text" for row in range(9)]
    times = pa.array([1 << 40 if row == 7 else 5 for row in range(9)], pa.timestamp("s"))
    return pa.table({"text": pa.array(texts, pa.binary()).view(pa.string()), "made": times})


@pytest.mark.parametrize("form", ["parquet", "parquet by pages", "arrow"])
def test_a_value_that_is_none_of_its_column_s_is_one_bad_record(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text in UTF-8, no date of Python's: other rows of the batch are not lost with it."""
    if form == "arrow":
        with pa.ipc.new_file(tmp_path / "a.arrow", table().schema) as writer:
            writer.write_table(table())
        make: Any = arrow
    else:
        pq.write_table(table(), tmp_path / "a.parquet")
        make = parquet
    if form == "parquet by pages":
        monkeypatch.setattr(parquet_files, "WHOLE", 0)
    source = make(tmp_path / f"a.{form.split()[0]}", lambda row: {"tokens": [len(row["text"])]})
    found = list(source.read(0))
    assert [index for index, _ in found] == list(range(9))
    bad = {index: each for index, each in found if isinstance(each, Bad)}
    assert {index: each.why.split(": ")[1] for index, each in bad.items()} == BAD
    assert all(each.rest is False for each in bad.values())
