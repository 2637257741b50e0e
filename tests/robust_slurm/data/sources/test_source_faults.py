"""Single values that cannot be had, and servers that give no answer for a while: bad records are
those of one row, and what may be over later is tried again."""

from __future__ import annotations

import re
import threading
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_files import FORMATS
from waiting import until

from robust_slurm.data import arrow, jsonl, parquet
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import lane as lanes
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.sources import parquet_files
from robust_slurm.data.sources.base import BadRecord

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
    bad = {index: each for index, each in found if isinstance(each, BadRecord)}
    assert {index: each.why.split(": ")[1] for index, each in bad.items()} == BAD
    assert all(each.rest is False for each in bad.values())


class Dropped(Exception):
    """An error of a client for some server: no OSError."""


class DroppedToo(OSError):
    """One without a number, as those of requests and huggingface_hub."""


@pytest.mark.parametrize("name", ["jsonl", "jsonl.zst", "jsonl.gz", "tar", "tar.gz", "parquet"])
def test_a_server_that_drops_a_connection_is_asked_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    make, write = FORMATS[name]
    rows = [{"tokens": [number]} for number in range(20)]
    files = MemoryFileSystem()
    files.pipe(f"/faults/a.{name}", write(rows))
    source = make(f"memory://faults/a.{name}", bad="skip", lanes=1)
    parts = len(source.parts())
    left = {"info": 1, "open": 1, "read": 4}

    def dropping(what: str, real: Any) -> Any:
        def asked(*args: Any, **options: Any) -> Any:
            if left[what]:
                left[what] -= 1
                raise (Dropped, DroppedToo)[left[what] % 2]("503")
            return real(*args, **options)

        return asked

    def drop(*_args: object) -> None:
        raise Dropped("amid a close")

    seek = MemoryFile.seek
    monkeypatch.setattr(MemoryFile, "seek", lambda *to: (seek(*to), None)[1])  # as paramiko's
    monkeypatch.setattr(MemoryFile, "close", drop)
    for each, what in (MemoryFileSystem, "info"), (MemoryFileSystem, "open"), (MemoryFile, "read"):
        monkeypatch.setattr(each, what, dropping(what, getattr(each, what)))
    monkeypatch.setattr(lanes, "PAUSES", (0.0,))
    lane = SourceLane(source, "web", 0, 1, 7, 64)
    found: list[int] = []
    while len(found) < len(rows):
        found += [int(sample.values["tokens"][0]) for sample, _ in lane.next_window()]
    assert sorted(found) == list(range(20)) and parts in (1, 5)
    assert not any(left.values()) and lane.tally.bad == 0


@pytest.mark.parametrize(("name", "asked"), [("c.jsonl", "info"), ("*.jsonl", "glob")])
def test_a_server_that_is_away_when_files_are_found_is_named(
    name: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def drop(*_args: object, **_options: object) -> None:
        raise Dropped("503")

    monkeypatch.setattr(MemoryFileSystem, asked, drop)
    with pytest.raises(DataError, match=r"memory://faults/.*jsonl: Dropped: 503"):
        jsonl(f"memory://faults/{name}").parts()


def test_a_server_that_is_away_for_good_is_a_stalled_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    MemoryFileSystem().pipe("/faults/b.jsonl", b'{"tokens": [1]}')
    source = jsonl("memory://faults/b.jsonl", patience=0.1)
    source.parts()

    def drop(*_args: object) -> None:
        raise Dropped("503")

    monkeypatch.setattr(MemoryFile, "read", drop)
    with pytest.raises(SourceStalled, match="record 0: Dropped: 503; tried for"):
        SourceLane(source, "web", 0, 1, 7, 64).next_window()


def test_an_outage_of_a_source_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    for name in "ab":
        MemoryFileSystem().pipe(f"/outage/{name}.jsonl", b'{"tokens": [1]}\n' * 9)
    source = jsonl("memory://outage/*.jsonl", stalled="wait")
    source.parts()
    away, asked, read = threading.Event(), Counter[str](), MemoryFile.read

    def answer(file: MemoryFile, *size: int) -> bytes:
        if away.is_set():
            asked[threading.current_thread().name] += 1
            raise PermissionError("403\nForbidden")
        return bytes(read(file, *size))

    monkeypatch.setattr(MemoryFile, "read", answer)
    monkeypatch.setattr(lanes, "PAUSES", (0.01,))
    both = [SourceLane(source, "web", lane, 2, 7, 64) for lane in range(2)]
    for _ in range(2):
        away.set()
        asked.clear()
        threads = [threading.Thread(target=lane.next_window, name=str(lane.lane)) for lane in both]
        for thread in threads:
            thread.start()
        until(lambda: min(asked["0"], asked["1"]) > 3, "both try again")
        away.clear()
        for thread in threads:
            thread.join()
        (said,) = capfd.readouterr().err.splitlines()
        assert said.startswith("robust-slurm: data: source web: memory://")
        then = 'trying again for 300 s, then stalled="wait" applies'
        assert re.search(rf"jsonl: record \d: 403 Forbidden; {then}$", said)
    tries = chain([True], repeat(False))
    monkeypatch.setattr(MemoryFile, "read", lambda *to: blip(next(tries), read, to))
    assert SourceLane(source, "web", 0, 2, 7, 64).next_window()
    assert not capfd.readouterr().err  # it was over at once


def blip(fails: bool, read: Any, to: Any) -> bytes:
    if fails:
        raise ConnectionResetError("reset")
    return bytes(read(*to))
