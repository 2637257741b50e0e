"""One accusation: what a user may write is read, and all else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_files import JOB, NAME, RECORD, UID, raw

from health.history.node_reports import main_job_of, parse


def test_what_robust_srun_writes_is_accepted() -> None:
    found = parse(raw(), NAME, "n1", JOB)
    assert found.symptom == "node_lost" and found.job == 7 and found.uid == UID
    assert found.evidence == ("no report for 6.0 s", "connection closed")
    assert parse(raw(later=[1]), NAME, "n1", JOB) == found  # of a newer one


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("node-lost", "node-lost"), ("\x1b[2J", ""), ("x" * 41, ""), (["nan"], ""), (None, "")],
)
def test_the_rule_behind_it_is_kept_if_it_is_an_id(rule: Any, kept: str) -> None:
    assert parse(raw(rule=rule), NAME, "n1", JOB).rule == kept


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 60000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (raw(v=2), "version"),
        (raw(v=True), "version"),
        (raw(v="1"), "version"),
        (raw(node="n2"), "another node"),
        (raw(node=["n1"]), "another node"),
        (raw(incident="e4"), "incident"),
        (raw(incident=None), "incident"),
        (raw(job=8), "not of job 7"),
        (raw(job="7"), "not of job 7"),
        (raw(job=7.0), "not of job 7"),
        (raw(time="now"), "time"),
        (raw(time=float("nan")), "time"),
        (raw(time=-1), "time"),
        (raw(time=10**400), "time"),
        (raw(time=True), "time"),
        (raw(symptom="node_lost; rm -rf"), "symptom"),
        (raw(symptom=""), "symptom"),
        (raw(symptom={"a": 1}), "symptom"),
        (raw(evidence="none"), "evidence"),
        (raw(evidence=[1]), "evidence"),
        (b'{"v":1,"job":' + b"7" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_what_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(content, NAME, "n1", JOB)


def test_evidence_is_cut_and_made_printable() -> None:
    lines = ["a\x1b[2Jb\n\x00c", "x" * 5000] + ["more"] * 100
    found = parse(raw(evidence=lines), NAME, "n1", JOB)
    assert found.evidence[0] == "a?[2Jb ?c"
    assert len(found.evidence[1]) == 300 and len(found.evidence) == 20


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=60), _json.map(lambda v: json.dumps(v).encode())))
def test_any_bytes_are_refused_not_raised_over(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse(content, NAME, "n1", JOB)


@given(st.dictionaries(st.sampled_from(sorted(RECORD)), _json, max_size=3))
def test_any_field_is_taken_or_refused(changes: dict[str, Any]) -> None:
    try:
        found = parse(raw(**changes), NAME, "n1", JOB)
    except ValueError as error:
        assert str(error)
    else:
        assert (found.job, found.uid) == (7, UID)
        assert all(line.isprintable() and len(line) <= 300 for line in found.evidence)


@pytest.mark.parametrize(
    ("comment", "job"),
    [
        ("robust: standby of job 12", 12),
        ("robust: standby of job 12 and more", 0),
        ("standby of job 12", 0),
        ("robust: standby of job 99999999999", 0),
        ("", 0),
    ],
)
def test_standby_allocations_name_their_job(comment: str, job: int) -> None:
    assert main_job_of(comment) == job
