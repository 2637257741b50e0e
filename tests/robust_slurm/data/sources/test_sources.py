"""Sources on real files of each format: the same records, from any record on, and what is wrong."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from corpus_files import FORMATS, Write, lines, parquet_of

from robust_slurm.data import arrow, jsonl, parquet, tar
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sources import arrow_files, parquet_files, turn
from robust_slurm.data.sources.base import BadRecord


def row(number: int) -> dict[str, Any]:
    return {"tokens": [number, *range(number % 3)], "text": f"n {number}"}


@pytest.fixture(params=FORMATS)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str, Write]:
    """Three files of 11, 1 and 6 records. Return the format, the files' pattern, and its writer."""
    make, write = FORMATS[request.param]
    for name, numbers in (("b", range(11)), ("a", range(11, 12)), ("c", range(12, 18))):
        (tmp_path / f"{name}.{request.param}").write_bytes(write([row(n) for n in numbers]))
    return make, str(tmp_path / f"*.{request.param}"), write


def test_each_format_gives_its_records_from_any_record_on(
    corpus: tuple[Any, str, Write], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "ROWS", 4)
    make, pattern, _ = corpus
    source = make(pattern, lanes=2)
    names = [part.name for part in source.parts()]
    assert names == sorted(names) and Path(names[0]).name.startswith("a.")
    found = []
    for part, _ in enumerate(names):
        whole = list(source.read(part))
        for _, values in whole:
            assert values["tokens"].dtype == np.int32 and values["tokens"].base is None
            found.append(values["tokens"].tolist())
        for start in range(len(whole) + 2):
            later = [(n, values["tokens"].tolist()) for n, values in source.read(part, start)]
            assert later == [(n, values["tokens"].tolist()) for n, values in whole[start:]]
    assert sorted(found) == [row(n)["tokens"] for n in range(18)]
    given = [
        sample.meta
        for lane in range(2)
        for sample, _ in islice(SourceLane(source, "web", lane, 2, 7, 4), 60)
        if sample.meta.ref.epoch == 0
    ]
    assert len(given) == 18 and sum(meta.tokens for meta in given) == 18 + 3 * 6


def test_decode_is_given_the_record_and_may_leave_it_out(corpus: tuple[Any, str, Write]) -> None:
    make, pattern, _ = corpus

    def decode(record: dict[str, Any]) -> dict[str, Any] | None:
        number = json.loads(record["json"])["tokens"][0] if make is tar else record["tokens"][0]
        text = record["txt"].decode() if make is tar else record["text"]
        if number == 14:
            raise ValueError("not this one")
        return None if number == 3 else {"ids": np.full(2, number), "text": text}

    source = make(pattern, decode, parallel=True)
    made = [values for n in range(len(source.parts())) for _, values in source.read(n)]
    assert [values.why for values in made if isinstance(values, BadRecord)] == [
        "ValueError: not this one"
    ]
    well = [values for values in made if isinstance(values, dict)]
    assert len(well) == 16 and made.count(None) == 1
    assert well[0]["ids"].tolist() == [11, 11] and well[0]["ids"].dtype == np.int64
    assert well[0]["text"] == ("text" if make is tar else "n 11")


def test_a_file_that_is_cut_off_has_a_bad_record_and_no_wrong_one(
    corpus: tuple[Any, str, Write], tmp_path: Path
) -> None:
    make, pattern, write = corpus
    file = Path(pattern.replace("*", "b"))
    for other in "ac":
        Path(pattern.replace("*", other)).unlink()
    content = write([row(n) for n in range(11)])
    for third in (1, 1.5, 2):
        file.write_bytes(content[: int(len(content) * third / 3)])
        source = make(pattern)
        try:
            found = [values for n in range(len(source.parts())) for _, values in source.read(n)]
        except DataError as error:  # the list of its parts is cut off
            assert str(error).startswith(str(file)) and make in (parquet, arrow)
            continue
        *well, bad = found
        expected = [row(n)["tokens"] for n in range(len(well))]
        assert [values["tokens"].tolist() for values in well] == expected
        assert isinstance(bad, BadRecord) and bad.part == str(file) and bad.record == len(well)


def test_every_file_that_is_cut_off_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gzip.compress(b'{"tokens": [1]}\n' * 4_000)
    for name in "abc":
        (tmp_path / f"{name}.jsonl.gz").write_bytes(whole[:-20])
    lane = SourceLane(jsonl(tmp_path / "*.gz", bad="skip", lanes=1), "web", 0, 1, 7, 4)
    next(sample for sample, _ in lane if sample.meta.ref.epoch == 1)
    told = capsys.readouterr().err
    assert [told.count(f"{name}.jsonl.gz: record") for name in "abc"] == [1, 1, 1]


def test_a_file_that_changed_is_an_error(corpus: tuple[Any, str, Write]) -> None:
    make, pattern, write = corpus
    source = make(pattern)
    assert source.parts() and source.fingerprint() == make(pattern).fingerprint()
    Path(pattern.replace("*", "a")).write_bytes(write([row(n) for n in range(300)]))
    with pytest.raises(DataError, match=r"/a\..*: \d+ bytes, and \d+ when it was found"):
        list(source.read(0))
    assert source.fingerprint() != make(pattern).fingerprint()
    Path(pattern.replace("*", "a")).unlink()
    with pytest.raises(FileNotFoundError):
        list(source.read(0))


def test_a_corpus_may_be_moved(corpus: tuple[Any, str, Write], tmp_path: Path) -> None:
    make, pattern, _ = corpus
    before = make(pattern).fingerprint()
    shutil.copytree(tmp_path, tmp_path / "other")
    assert make(str(tmp_path / "other" / Path(pattern).name)).fingerprint() == before
    Path(pattern.replace("*", "c")).rename(pattern.replace("*", "d"))
    assert make(pattern).fingerprint() != before


def test_urls_are_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    for name, (_, write) in FORMATS.items():
        for number in range(2):
            with fsspec.open(f"memory://corpus/{number}.{name}", "wb") as file:
                file.write(write([row(n) for n in range(9 * number, 9 * number + 9)]))
    for name, (make, _) in FORMATS.items():
        if make is arrow:
            with pytest.raises(DataError, match="give local ones"):
                make(f"memory://corpus/*.{name}")
            continue
        source = make([f"memory://corpus/*.{name}", f"memory://corpus/0.{name}"])
        assert source.parts()[0].name.startswith(f"memory:///corpus/0.{name}")
        made = [values for n in range(len(source.parts())) for _, values in source.read(n)]
        assert [v["tokens"].tolist() for v in made] == [row(n)["tokens"] for n in range(18)]
    with pytest.raises(DataError, match="nosuch://a"):
        jsonl("nosuch://a/*.jsonl").parts()


@pytest.mark.slow
def test_datasets_that_hugging_face_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([row(n) for n in range(18)])
    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    source = arrow(str(tmp_path / "saved" / "train"))
    found = [v["tokens"].tolist() for n in range(2) for _, v in source.read(n)]
    assert found == [row(n)["tokens"] for n in range(18)] and len(source.parts()) == 2
    with pytest.raises(DataError, match="datasets train; give the folder of one"):
        arrow(str(tmp_path / "saved")).parts()
    with pytest.raises(DataError, match=r"no dataset that save_to_disk\(\) saved"):
        arrow(str(tmp_path)).parts()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"tokens": [1]}\n{"text": "a"}\n', r'without "tokens"; give decode='),
        (b'{"tokens": [1]}\n{"tokens": [1\n', "JSONDecodeError"),
        (b'{"tokens": [1]}\n[1, 2]\n', r'without "tokens"'),
        (b'{"tokens": [1]}\n{"tokens": [99999999999]}\n', "beyond 32 bits"),
        (b'{"tokens": [1]}\n\xff\n', "UnicodeDecodeError"),
    ],
)
def test_lines_that_are_no_records_say_why(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    lane = SourceLane(jsonl(tmp_path / "a.jsonl"), "web", 0, 1, 7, 4)
    with pytest.raises(DataError, match=rf"a\.jsonl: record 1: .*{why}"):
        next(lane)


def test_json_is_what_the_standard_library_takes_it_for(tmp_path: Path) -> None:
    odd = b'[1e400, NaN, "\\ud800", 123456789012345678901234567890, {"a": 1, "a": 2}]'
    (tmp_path / "a.jsonl").write_bytes(odd)
    found: list[Any] = []
    list(jsonl(tmp_path / "a.jsonl", found.append).read(0))
    assert repr(found[0]) == repr(json.loads(odd))


def test_lists_that_decode_returns_become_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    made = {
        "tokens": [3, 1], "mask": (0, 1), "weight": [0.5, 1], "grid": [[1], [2]], "none": [],
        "words": ["a", "b"], "half": np.zeros(2, np.float16), "name": "x",
    }  # fmt: skip
    [(_, values)] = jsonl(tmp_path / "a.jsonl", lambda _: made).read(0)
    assert isinstance(values, dict)
    kinds = {name: str(getattr(value, "dtype", type(value))) for name, value in values.items()}
    assert kinds == {
        "tokens": "int32", "mask": "int32", "weight": "float32", "grid": "int32", "none": "int32",
        "words": "<class 'list'>", "half": "float16", "name": "<class 'str'>",
    }  # fmt: skip


@pytest.mark.parametrize("value", [[1 << 40], [[1], [1 << 40]]])
def test_a_number_beyond_32_bits_is_no_other_number(tmp_path: Path, value: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    [(_, bad)] = jsonl(tmp_path / "a.jsonl", lambda _: {"ids": value}).read(0)
    assert isinstance(bad, BadRecord) and "beyond 32 bits: return an array of int64" in bad.why


@pytest.mark.parametrize("error", [TimeoutError("timed out"), FileNotFoundError("s3://b/k")])
def test_an_error_that_may_be_over_later_is_no_bad_record(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec and sockets raise it without errno. Another rank would have had the record."""
    assert error.errno is None

    def fails(*_args: object) -> Any:
        raise error

    (tmp_path / "a.jsonl").write_bytes(b"{}")
    with pytest.raises(type(error)):
        next(jsonl(tmp_path / "a.jsonl", fails, bad="skip").read(0))
    (tmp_path / "a.parquet").write_bytes(parquet_of([row(1)]))
    source = parquet(tmp_path / "a.parquet", bad="skip")
    assert source.parts()
    monkeypatch.setattr(parquet_files, "rows", fails)
    with pytest.raises(type(error)):
        next(source.read(0))


def test_a_small_row_group_is_read_as_a_whole_and_its_file_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that waits holds its rows alone; large groups come by pages, with the same records."""
    rows = [{"text": "x" * 1000 + str(number)} for number in range(300)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = parquet(tmp_path / "a.parquet", lambda row: {"tokens": [int(row["text"][1000:])]})
    read = lambda start: [(at, int(got["tokens"][0])) for at, got in source.read(0, start)]  # noqa: E731
    before = pyarrow.total_allocated_bytes()
    lane = source.read(0, 0)
    next(lane)
    assert pyarrow.total_allocated_bytes() - before < 350_000
    lane.close()
    whole = [read(start) for start in (0, 70, 299)]
    monkeypatch.setattr(parquet_files, "WHOLE", 0)
    assert [read(start) for start in (0, 70, 299)] == whole
    assert whole[1] == [(number, number) for number in range(70, 300)]


def test_a_module_that_is_missing_is_no_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")

    def decode(record: dict[str, Any]) -> dict[str, Any]:
        import no_such_module  # type: ignore[import-not-found]

        return {"tokens": no_such_module.tokens(record)}

    lane = SourceLane(jsonl(tmp_path / "a.jsonl", decode, bad="skip"), "web", 0, 1, 7, 4)
    with pytest.raises(DataError, match=r"a\.jsonl: record 0: No module named 'no_such_module'"):
        next(lane)


def test_one_thread_decodes_at_a_time_and_a_long_decode_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([row(1)]))
    monkeypatch.setattr(turn, "LONG", 0.0)
    entered, leave = threading.Event(), threading.Event()

    def waits(record: Any) -> Any:
        entered.set()
        assert leave.wait(60)
        return record

    def other(record: Any) -> Any:
        assert leave.is_set(), "called beside the first"
        return record

    sources = [jsonl(tmp_path / "a.jsonl", waits), jsonl(tmp_path / "a.jsonl", other, patience=0.1)]
    feeds = [LocalFeed(SourceLane(source, "web", 0, 1, 7, 1), ReadBudget()) for source in sources]
    feeds[0].seek(Position())
    assert entered.wait(60)
    feeds[1].seek(Position())
    with pytest.raises(SourceStalled, match=r"decode has run for 0 s on .*a\.jsonl: record 0$"):
        feeds[1].next()
    leave.set()
    assert [feed.next()[0].tokens for feed in feeds] == [2, 2]
    for feed in feeds:
        feed.close()


def test_empty_lines_and_records_without_a_token_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"tokens": []}\n  \n{"tokens": [5]}')
    found = list(jsonl(tmp_path / "a.jsonl").read(0))
    assert [index for index, values in found if values is not None] == [3]


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"web/\*\.jsonl: no such file"):
        jsonl(str(tmp_path / "web" / "*.jsonl")).parts()
    with pytest.raises(DataError, match="list of patterns is empty"):
        jsonl([]).parts()
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="web: no sample in 1 part"):
        next(SourceLane(jsonl(tmp_path / "a.jsonl"), "web", 0, 1, 7, 4))
    (tmp_path / "a.parquet").write_bytes(parquet_of([{"text": "a"}]))
    with pytest.raises(DataError, match=r"a\.parquet: no column 'tokens', but text; give columns="):
        parquet(tmp_path / "a.parquet").parts()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lane": 3}, "no option lane=; did you mean lanes?"),
        ({"lanes": 0}, "lanes=0; give a number >= 1"),
        ({"bad": "ignore"}, "bad='ignore'; it is one of"),
        ({"most_bad": 5}, "most_bad is a share from 0 to 1"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError) as told:
        jsonl("a", **options)
    assert why in str(told.value)
