"""Lanes: every record once a pass, the same order from every position, bad records, errors."""

from __future__ import annotations

import errno
import io
import sys
from collections import Counter
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_source import ListedSource, Record, numbered

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import lane as lane_module
from robust_slurm.data.lanes import order
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Sample
from robust_slurm.data.sources.base import BadRecord


def lanes_of(source: Any, lanes: int, seed: int = 7, window: int = 4) -> list[SourceLane]:
    count = order.lanes_of(lanes, len(source.parts()))
    return [SourceLane(source, "web", n, count, seed, window) for n in range(count)]


def token(sample: Sample) -> int:
    return int(sample.values["tokens"][0])


def first_pass(lane: SourceLane, passes: int = 1) -> list[int]:
    """Return the tokens of the lane's first passes."""
    epochs = takewhile(lambda given: given[0].meta.ref.epoch < passes, lane)
    return [token(sample) for sample, _ in epochs]


def test_orders_are_those_of_every_machine_and_version() -> None:
    assert order.permutation(10, 7, "web") == [7, 1, 3, 2, 8, 4, 6, 0, 5, 9]
    assert order.permutation(0, 7) == [] and order.permutation(1, 7) == [0]
    assert order.parts_of_lane([5] * 8, 7, "web", 0, 1, 3) == [4, 5, 0]
    assert order.window_order(8, 7, "web", 1, 2, 3) == [7, 3, 5, 6, 0, 2, 1, 4]
    lane = lanes_of(numbered([9, 9]), 1)[0]
    assert [token(sample) for sample, _ in islice(lane, 12)] == (
        [1000, 1003, 1002, 1001, 1007, 1004, 1006, 1005, 1008, 0, 3, 1]
    )


SIZES = st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(any)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_all_lanes_give_every_record_once_a_pass(
    sizes: list[int], lanes: int, window: int, seed: int
) -> None:
    source = numbered(sizes)
    given = Counter(
        token
        for lane in lanes_of(source, lanes, seed, window)
        for token in first_pass(lane, passes=2)
    )
    assert given == Counter({n: 2 for part in source.records for n in part})


@settings(max_examples=60)
@given(SIZES, st.integers(1, 3), st.integers(1, 6), st.integers(0, 40), st.data())
def test_a_lane_goes_on_from_every_position_as_if_it_had_not_stopped(
    sizes: list[int], lanes: int, window: int, steps: int, data: st.DataObject
) -> None:
    records: list[list[Record]] = [
        [data.draw(st.sampled_from([1000 * n + i] * 4 + [None])) for i in range(size)]
        for n, size in enumerate(sizes)
    ]
    if not any(record is not None for part in records for record in part):
        records[0] = [1]
    source = ListedSource(records)
    lane = data.draw(st.sampled_from(lanes_of(source, lanes, window=window)))
    undisturbed = list(islice(lane, steps + 12))
    position = undisturbed[steps - 1][1] if steps else Position()
    source.reads.clear()
    lane.seek(position)
    resumed = [next(lane) for _ in range(12)]
    assert [(s.meta, p) for s, p in resumed] == [(s.meta, p) for s, p in undisturbed[steps:]]
    assert source.reads[0][1] == position.taken // window * window


def test_the_position_after_the_last_sample_of_a_pass_is_in_the_next() -> None:
    lane = lanes_of(numbered([5, 0, 3]), 1)[0]
    positions = [position for _, position in islice(lane, 8)]
    assert positions[-1] == Position(1, 0, 0) or positions[-1].epoch == 1
    assert [position.epoch for position in positions] == [0] * 7 + [1]


def test_bad_and_left_out_records_change_nothing_of_the_others_order() -> None:
    well = numbered([40])
    bad: list[Record] = list(well.records[0])
    bad[3], bad[17], bad[39] = BadRecord("part0", 3, "no JSON"), None, BadRecord("part0", 39, "cut")
    source = ListedSource([bad], bad="skip")
    lane = lanes_of(source, 1)[0]
    expected = [n for n in first_pass(lanes_of(well, 1)[0]) if n not in (3, 17, 39)]
    assert first_pass(lane) == expected
    lane.seek(Position())
    first_pass(lane)
    assert lane.tally.bad >= 2
    assert lane.tally.records < 80, "records that are read again count once"


def test_a_bad_record_is_an_error_that_locates_it() -> None:
    source = ListedSource([[1, BadRecord("web/a.jsonl", 1, "Expecting value")]])
    with pytest.raises(DataError, match=r"^web/a\.jsonl: record 1: Expecting value; bad=\"skip\""):
        list(islice(lanes_of(source, 1)[0], 1))


def test_skipped_records_are_reported_the_first_the_tenth_and_so_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    part: list[Record] = [
        BadRecord("web/a.jsonl", n, "no JSON") if n % 4 == 1 else n for n in range(48)
    ]
    lane = lanes_of(ListedSource([part], bad="skip", most_bad=1), 1)[0]
    first_pass(lane)
    start = "robust-slurm: data: web/a.jsonl: record"
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"{start} 1: no JSON; 1 bad record of 2 skipped by this lane",
        f"{start} 37: no JSON; 10 bad records of 38 skipped by this lane",
    ]


def test_a_stderr_that_is_closed_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    lane = lanes_of(ListedSource([[1, BadRecord("p", 1, "no"), 3]], bad="skip", most_bad=1), 1)[0]
    assert len(first_pass(lane)) == 2


def test_too_many_bad_records_are_an_error() -> None:
    part: list[Record] = [BadRecord("p", n, "no") if n % 10 == 0 else n for n in range(500)]
    lane = lanes_of(ListedSource([part], bad="skip", most_bad=0.02), 1)[0]
    with pytest.raises(DataError, match=r"21 bad records of 201, more than most_bad=0\.02"):
        first_pass(lane)


def test_a_source_without_a_sample_is_an_error_and_not_an_endless_search() -> None:
    for parts in ([[], []], [[None], [BadRecord("p", 0, "no")]]):
        with pytest.raises(DataError, match="web: no sample in 2 parts"):
            next(lanes_of(ListedSource(parts, bad="skip"), 2)[0])


def test_a_lane_whose_parts_are_empty_this_time_reads_the_next_pass() -> None:
    lanes = lanes_of(numbered([1, 0]), 2)
    assert len(lanes) == 2
    given = {(token(sample), sample.meta.ref.epoch) for lane in lanes for sample, _ in [next(lane)]}
    assert len(given) == 2 and {n for n, _ in given} == {0}, "each from a pass of its own"


def test_lanes_of_files_of_unlike_sizes_are_of_about_one_length() -> None:
    sizes = [90, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    loads = [
        sum(sizes[part] for part in order.parts_of_lane(sizes, seed, "web", 0, lane, 2))
        for seed in range(20)
        for lane in range(2)
    ]
    assert max(loads) <= 140 and min(loads) >= 40 and order.lanes_of(4, 3) == 3


def test_samples_are_read_again_by_their_names() -> None:
    source = numbered([30, 30])
    lane = lanes_of(source, 1)[0]
    samples = [sample for sample, _ in islice(lane, 60)]
    source.reads.clear()
    wanted = [samples[n] for n in (50, 2, 3, 40, 2)]
    again = lane.again(sample.meta.ref for sample in wanted)
    assert [token(s) for s in again] == [token(s) for s in wanted]
    assert [s.meta for s in again] == [s.meta for s in wanted]
    with pytest.raises(DataError, match="part1: record 99 cannot be read again"):
        lane.again([samples[0].meta.ref._replace(part=1, record=99, piece=2)])


def test_a_part_is_opened_again_after_an_error_of_its_file_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_module, "PAUSES", (0.0,))
    source = numbered([20])
    errors = [OSError(errno.EIO, "Input/output error")] * 3

    def fails(part: int, record: int) -> None:
        if record == 11 and errors:
            raise errors.pop()

    source.before = fails
    lane = lanes_of(source, 1)[0]
    assert first_pass(lane) == first_pass(lanes_of(numbered([20]), 1)[0])
    assert source.reads[:4] == [(0, 0), (0, 11), (0, 11), (0, 11)]


def test_a_pause_amid_which_the_job_was_suspended_is_not_what_it_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + (1000.0 if now[0] < 3000 else 0.0)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(lane_module, "time", clock)
    source = numbered([20], patience=50.0)

    def fails(part: int, record: int) -> None:
        if record == 11:
            raise OSError(errno.EIO, "Input/output error")

    source.before = fails
    with pytest.raises(SourceStalled, match="record 11: Input/output error; tried for 50 s"):
        first_pass(lanes_of(source, 1)[0])
    assert len(source.reads) > 10


def test_a_file_that_is_gone_is_told_with_its_name_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_module, "GONE", 0.0)
    source = numbered([20])
    gone = [FileNotFoundError(errno.ENOENT, "No such file or directory")] * 2

    def fails(part: int, record: int) -> None:
        if record == 6 and gone:
            raise gone.pop()

    source.before = fails
    lane = lanes_of(source, 1)[0]
    given: list[int] = []
    for _ in range(2):
        with pytest.raises(SourceStalled, match="web: part0: record 6: No such file or directory"):
            given.extend(token(next(lane)[0]) for _ in range(20))
    given.extend(token(next(lane)[0]) for _ in range(20 - len(given)))
    assert given == first_pass(lanes_of(numbered([20]), 1)[0])
