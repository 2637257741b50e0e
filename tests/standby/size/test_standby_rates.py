"""Rates measured from a state directory: written by those who write it, and by hostile hands."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_records import NOW, Job, drained, one_job

from robust_slurm.state_dir.ledger import append_line
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from standby.size import ledger
from standby.size.answer import size_of
from standby.size.count import LossSource, SizeError
from standby.size.history import DAY, Loss, Span, chronicle_spans, incident, lines
from standby.size.ledger import Ledger
from standby.size.observed import events, merge, node_days, observe


def seen(state_dir: Path, node_days: float | None = None, since: float = 0.0) -> Any:
    return Ledger(state_dir, NOW).observed(node_days, since)


# ---------------------------------------------------------------- what is counted


def test_losses_over_the_time_that_nodes_ran(tmp_path: Path) -> None:
    one_job(tmp_path, NOW)
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(40.0)
    assert (found.sizes, found.incidents, found.drains, found.left_out) == ({1: 1}, 1, 0, 0)
    assert (found.jobs, found.nodes, found.problems) == (1, 5, ())
    assert found.sources() == [LossSource(1, pytest.approx(1 / 40))]
    assert (found.begin, found.end) == pytest.approx((NOW - 10 * DAY, NOW))


def test_only_the_last_days(tmp_path: Path) -> None:
    one_job(tmp_path, NOW)
    found = seen(tmp_path, since=NOW - 3 * DAY)
    assert found.node_days == pytest.approx(12.0) and found.sizes == {}
    found = seen(tmp_path, since=NOW - 5 * DAY)
    assert found.node_days == pytest.approx(20.0) and found.sizes == {1: 1}


def test_an_earlier_run_of_a_requeued_job_counts(tmp_path: Path) -> None:
    """The roster is the last run's; the chronicle keeps all of them."""
    job = Job(tmp_path, 7, NOW)
    job.epoch(20, 1, "n1", "n2")
    job.lost(18, ("n2", ""))  # nothing could replace it
    job.event(18, "news", text="requeued")
    job.epoch(10, 1, "n1", "n3")
    job.roster(10, 0, "n1", "n3")
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(2 * 2 + 2 * 10) and found.sizes == {1: 1}


def test_a_roster_does_where_there_is_no_chronicle(tmp_path: Path) -> None:
    job = Job(tmp_path, 7, NOW)
    job.roster(5, 1, "n1", "n2", "n3")
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(12.0) and found.nodes == 3


def test_a_node_in_two_jobs_at_once_is_one_node(tmp_path: Path) -> None:
    for number in (7, 8):
        job = Job(tmp_path, number, NOW)
        job.epoch(4, 1, "n1", "n2")
        job.roster(4, 0, "n1", "n2")
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(8.0) and found.jobs == 2


def test_drains_count_where_a_job_was(tmp_path: Path) -> None:
    one_job(tmp_path, NOW)
    drained(tmp_path, "n3", NOW - 2 * DAY)  # in the job
    drained(tmp_path, "n2", NOW - 4 * DAY + 400, job=7)  # the incident again
    drained(tmp_path, "n2", NOW - 2.5 * DAY)  # not in the job any more
    drained(tmp_path, "n9", NOW - 3 * DAY)  # never in it
    drained(tmp_path, "n4", NOW - 1 * DAY, cls="user")
    drained(tmp_path, "n4", NOW - 1 * DAY, cls="tool")
    for fleets in ("drains", "strikes"):  # files of no single node
        text = (tmp_path / "nodes/n3.jsonl").read_bytes() + b"torn"
        (tmp_path / "nodes" / f"{fleets}.jsonl").write_bytes(text)
    found = seen(tmp_path)
    assert (found.sizes, found.incidents, found.drains) == ({1: 2}, 1, 1)
    assert found.left_out == 3 and not found.problems
    # A person who gives the node-days speaks for all nodes: then all of them count.
    found = seen(tmp_path, node_days=500.0)
    assert (found.sizes, found.left_out, found.given) == ({1: 4}, 0, True)
    assert found.sources() == [LossSource(1, pytest.approx(4 / 500))]


def test_nodes_lost_together_are_one_event(tmp_path: Path) -> None:
    """A switch takes nodes of two jobs; the gate drains a third one of it."""
    for number, first in ((7, 0), (8, 8)):
        job = Job(tmp_path, number, NOW)
        names = [f"n{first + i}" for i in range(8)]
        job.epoch(10, 1, *names)
        job.lost(5, *[(name, f"s{name}") for name in names[:3]])
        job.epoch(5, 2, *(f"s{name}" for name in names[:3]), *names[3:])
        job.roster(10, 0, *names)
    drained(tmp_path, "n7", NOW - 5 * DAY + 20)
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(160.0) and found.sizes == {7: 1}
    assert found.sources() == [LossSource(1, 0.0), LossSource(7, pytest.approx(1 / 160))]


def test_what_blames_no_node_does_not_count(tmp_path: Path) -> None:
    job = one_job(tmp_path, NOW)
    failures = [Failure("crash", 100.0, 99.0, "n1", rank=0, code=1, tail="ValueError: x")]
    it = Incident("0-2", 2, diagnose(failures), 99.0, 100.0)
    it.wall = NOW - DAY
    append_line(job.dir / "incidents.jsonl", it.record(7, "0"))
    assert seen(tmp_path).sizes == {1: 1}


@pytest.mark.parametrize(
    ("record", "nodes"),
    [
        ({"cause": "node", "suspects": ["a", "b"], "swaps": []}, ("a", "b")),
        ({"cause": "node", "suspects": ["a"], "swaps": [["a", "s1"]]}, ("a",)),
        ({"cause": "node", "suspects": ["a"], "outcome": "warned"}, None),
        ({"cause": "node", "suspects": ["a"], "outcome": "observed: would replace a"}, None),
        (
            {"cause": "node", "suspects": ["a"], "outcome": "observed: …", "symptom": "node_lost"},
            ("a",),
        ),
        ({"cause": "unknown", "suspects": ["a"], "swaps": [["a", "s1"]]}, ("a",)),
        ({"cause": "unknown", "suspects": ["a", "b"], "swaps": []}, None),
        ({"cause": "user", "suspects": [], "swaps": []}, None),
        ({"cause": "node", "suspects": "abc", "swaps": {"a": 1}}, None),
        ({"cause": "node", "suspects": [1, None, ["x"], ""], "swaps": [[], 5, [7]]}, None),
        ({"cause": ["node"], "suspects": ["a"]}, None),
        ({}, None),
    ],
)
def test_the_nodes_of_an_incident(record: dict[str, Any], nodes: tuple[str, ...] | None) -> None:
    found = incident({"time": 5.0, **record}, 3)
    assert (found.nodes if found else None) == nodes


def loss(time: float, *nodes: str, job: int = 1, gate: bool = False) -> Loss:
    return Loss(time, nodes, job, gate)


@pytest.mark.parametrize(
    ("losses", "sizes"),
    [
        ([], []),
        ([loss(0, "a"), loss(90, "b")], [1, 1]),
        ([loss(0, "a"), loss(50, "b")], [2]),
        ([loss(0, "a"), loss(50, "b"), loss(100, "c")], [2, 1]),  # within 60 s of the first
        ([loss(0, "a"), loss(300, "a")], [1]),  # the same fault, seen twice
        ([loss(0, "a"), loss(300, "a", "b")], [1, 1]),
        ([loss(0, "a"), loss(4000, "a")], [1, 1]),
        ([loss(0, "a"), loss(9000, "a", job=1, gate=True)], [1]),  # the drain for that incident
        ([loss(0, "a"), loss(9000, "a", job=2, gate=True)], [1, 1]),
        ([loss(0, "a", job=0, gate=True), loss(9000, "a", job=0, gate=True)], [1, 1]),
        ([loss(30, "a", gate=True), loss(0, "a")], [1]),
    ],
)
def test_events(losses: Sequence[Loss], sizes: list[int]) -> None:
    assert events(losses) == sizes


SPANS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 20)).map(
        lambda t: Span(t[0], float(t[1]), float(t[1] + t[2]))
    ),
    max_size=12,
)


@given(SPANS)
def test_time_told_twice_counts_once(spans: list[Span]) -> None:
    ticks = {(s.node, t) for s in spans for t in range(int(s.begin), int(s.end))}
    merged = merge(spans)
    assert node_days(merged) * DAY == pytest.approx(len(ticks))
    for times in merged.values():
        ends = [t for pair in times for t in pair]
        assert ends == sorted(ends)


def test_a_node_that_comes_back_has_two_spans() -> None:
    records = [
        {"time": 10.0, "event": "epoch", "epoch": 1, "nodes": ["a", "b"]},
        {"time": 20.0, "event": "failure"},
        {"time": 21.0, "event": "failure"},
        {"time": 25.0, "event": "epoch", "epoch": 2, "nodes": ["a", "c"]},
        {"time": 28.0, "event": "epoch", "epoch": None, "nodes": ["z"]},
        {"time": 30.0, "event": "failure"},
        {"time": 35.0, "event": "epoch", "epoch": 3, "nodes": ["a", "b"]},
        {"time": 40.0, "event": "news"},
    ]
    assert set(chronicle_spans(records, 50.0)) == {
        Span("a", 10.0, 50.0),
        Span("b", 10.0, 20.0),
        Span("c", 25.0, 30.0),
        Span("b", 35.0, 50.0),
    }
    assert {span.end for span in chronicle_spans(records, 0.0)} == {20.0, 30.0, 40.0}


# ---------------------------------------------------------------- hostile and torn


def test_bad_lines_are_skipped_and_told(tmp_path: Path) -> None:
    job = one_job(tmp_path, NOW)
    with (job.dir / "incidents.jsonl").open("ab") as file:
        file.write(b'not json\n[1]\n{"time": "soon"}\n{"time": 1e400}\n{"time": true}\n')
        file.write(b'{"time": %d, "cause": "node", "suspects": ["n1"]}\n' % (NOW + 2 * DAY))
        file.write(b"[" * 100_000 + b"\n" + b'{"time": 17000')
    drained(tmp_path, "n3", NOW - 2 * DAY)
    with (tmp_path / "nodes" / "n3.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n\n")
    found = seen(tmp_path)
    assert found.sizes == {1: 2} and found.node_days == pytest.approx(40.0)
    assert any("incidents.jsonl: 8 unreadable lines skipped" in text for text in found.problems)
    assert any("n3.jsonl: 1 unreadable lines skipped" in text for text in found.problems)


def test_times_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    one_job(tmp_path, NOW)
    job = Job(tmp_path, 9, NOW)
    job.roster(10_000, 0, "x1", "x2")  # ran for 27 years
    job = Job(tmp_path, 10, NOW)
    job.roster(1, 2, "y1")  # ended before it began
    job = Job(tmp_path, 11, NOW)
    job.epoch(1, 1, "z1")
    job.roster(1, -30, "z1")  # still runs next month
    found = seen(tmp_path)
    assert found.node_days == pytest.approx(40.0)
    assert sum("are impossible; skipped" in text for text in found.problems) == 3


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    job = one_job(tmp_path, NOW)
    (tmp_path / "jobs" / "8").symlink_to(job.dir)
    other = Job(tmp_path, 9, NOW)
    (other.dir / "incidents.jsonl").symlink_to(job.dir / "incidents.jsonl")
    os.mkfifo(other.dir / "events.jsonl")
    (tmp_path / "jobs" / "10").write_text("no directory")
    found = seen(tmp_path)
    assert found.sizes == {1: 1} and found.node_days == pytest.approx(40.0)
    told = "\n".join(found.problems)
    assert "jobs/9/events.jsonl" in told and "jobs/9/incidents.jsonl" in told


def test_an_incident_of_a_job_that_nobody_watched_is_left_out(tmp_path: Path) -> None:
    one_job(tmp_path, NOW)
    job = Job(tmp_path, 9, NOW)
    job.lost(3, ("n9", "s9"))
    found = seen(tmp_path)
    assert found.sizes == {1: 1} and found.left_out == 1


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    for number in range(100, 150):
        job = Job(tmp_path, number, NOW)
        (job.dir / "events.jsonl").write_text("x\n")
    found = seen(tmp_path)
    assert len(found.problems) == 21 and found.problems[-1] == "30 more of this kind"


@pytest.mark.parametrize("limit", ["JOBS_BYTES", "JOBS_ENTRIES"])
def test_all_jobs_together_are_bounded(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_job(tmp_path, NOW)
    big = Job(tmp_path, 9, NOW)
    big.epoch(1, 1, *(f"x{i}" for i in range(50)))
    drained(tmp_path, "n9", NOW - DAY)
    monkeypatch.setattr(ledger, limit, 20)
    found = seen(tmp_path, node_days=100.0)
    assert found.nodes <= 20 and found.incidents == 0  # job 7 is older
    assert found.drains == 1  # what root wrote is read all the same
    assert any("jobs 9 and older are left out, or in part" in text for text in found.problems)


def test_reports_are_not_looked_at(tmp_path: Path) -> None:
    job = one_job(tmp_path, NOW)
    (job.dir / "accusations").mkdir(exist_ok=True)
    (job.dir / "accusations" / "a.json").write_text("no accusation")
    assert seen(tmp_path).problems == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
RECORD = st.fixed_dictionaries(
    {"time": st.floats(0, NOW) | JSON},
    optional={
        "event": st.sampled_from(["epoch", "failure"]) | JSON,
        "epoch": st.integers(0, 3) | JSON,
        "nodes": st.lists(st.sampled_from(["a", "b"])) | JSON,
        "suspects": JSON,
        "swaps": JSON,
        "cause": st.just("node") | JSON,
    },
)


@given(st.lists(RECORD, max_size=6), st.binary(max_size=20))
def test_no_content_can_break_it(records: list[dict[str, Any]], rest: bytes) -> None:
    raw = b"".join(json.dumps(record).encode() + b"\n" for record in records) + rest
    found = lines(raw, NOW)
    assert len(found.records) <= len(records) + rest.count(b"\n")
    losses = [it for record in found.records if (it := incident(record, 1))]
    spans = list(chronicle_spans(found.records, NOW))
    assert all(span.begin <= span.end for span in spans)
    seen = observe(losses, {1: spans}, ())
    assert seen.incidents + seen.left_out == len(losses)
    assert sum(size * count for size, count in seen.sizes.items()) <= sum(
        len(loss.nodes) for loss in losses
    )


# ---------------------------------------------------------------- the pool from it


def observed(node_days: float, **sizes: int) -> Any:
    empty = observe([], {}, (), node_days)
    return empty._replace(sizes={int(key[1:]): count for key, count in sizes.items()})


def test_groups_that_were_seen_count_at_their_own_size() -> None:
    seen = observed(10_000, x1=12, x8=2, x3=1)
    found = size_of(1024, seen.sources(), 24.0, 0.99, seen)
    assert [cause.size for cause in found.causes] == [1, 3, 8]
    assert [cause.per_1000 for cause in found.causes] == pytest.approx([1.2, 0.1, 0.2])
    assert found.standbys > 8 > found.causes[0].standbys == 4
    assert not found.notes


def test_nothing_lost_yet() -> None:
    seen = observed(10_000)
    found = size_of(1024, seen.sources(), 24.0, 0.99, seen)
    assert found.standbys == 0 and found.causes[0].days is None
    assert "may be up to 0.3 per 1,000 node-days" in found.notes[0]


def test_too_short_a_time() -> None:
    with pytest.raises(SizeError):
        size_of(8, observed(0.5, x1=1).sources(), 24.0, 0.99)
