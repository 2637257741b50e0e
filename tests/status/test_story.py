"""A node's suspicions: joined from what jobs and the node gate wrote, whatever they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from status_records import NOW, accusation, incident, roster
from suspicion_records import ADA, BOB, event, job, of_node

from robust_slurm.state_dir.files import JobRecord
from robust_slurm.state_dir.node_events import KINDS, NodeEvent, event_from, events_from, report_of
from robust_slurm.state_dir.records import incident_from, node_report_from
from status.lemons import lemon
from status.rules import rule_rows
from status.story import Suspicion, proven_good
from status.suspicions import story

DRAIN = {"reason": "robust:node:gemm:-:service:job7", "check": "gemm", "class": "node"}
BEHIND = [{"job": 7, "name": "n2.i1.json"}]
TESTED = "stop-time tests name n2"
OTHERS = [f"n2: eth{n} tx_errors +9 since robust-task began there" for n in range(5)]
COUNTERS = OTHERS + [
    f"n{n}: mlx5_0 port 1 symbol_error +412 since robust-task began there" for n in (2, 20)
]
OLD = {"name": None}  # an event that does not name the report


def texts(one: Suspicion) -> list[str]:
    return [line.text for line in one.lines]


def test_reported_confirmed_drained_repaired_undrained() -> None:
    (one,) = of_node(
        [
            job(
                7,
                [{"rule": "node-lost"}],
                [{"tests": ["stop-time tests name n2"], "counters": COUNTERS}],
            )
        ],
        [
            event("accusation", 10, result="confirmed", why=["gemm: 3 of 100 products wrong"]),
            event("drain", 11, **DRAIN, evidence="FAIL gemm: 3 wrong", reports=BEHIND),
            event("repaired", 20, note="new GPU", by="root"),
            event("undrain", 30, reason=DRAIN["reason"]),
        ],
    )
    assert texts(one) == [
        "job 7 of ada reported n2: node lost (rule node-lost, incident i1)",
        "evidence: silent for 3 s",
        "evidence: ping failed",
        "error counters: mlx5_0 port 1 symbol_error +412 since robust-task began there",
        *(f"error counters: {line.removeprefix('n2: ')}" for line in OTHERS[:4]),
        "error counters: and 1 more lines",
        f"tests: {TESTED}",
        "job 7 evicted n2; n3 took its ranks",
        "outcome in job 7: recovered; 3 steps lost",
        "the gate confirmed the report: gemm: 3 of 100 products wrong",
        "drained: robust:node:gemm:-:service:job7",
        "evidence: FAIL gemm: 3 wrong",
        "n2 was reported as repaired by root: new GPU",
        "undrained: every check passes on n2 (robust:node:gemm:-:service:job7)",
    ]
    assert (one.verdict, one.evicted, one.progressed, one.drained) == ("confirmed", True, True, "")


def test_cleared_struck_and_later_withdrawn() -> None:
    (one,) = of_node(
        [job(7, [{}], [{}])],
        [
            event("accusation", 10, result="cleared", why=["1 tests of [accusations] were run"]),
            event("strike", 10.1),
            event("withdrawn", 50, name="n2.i1.withdrawn.json", why="the same error on n2, n3"),
        ],
    )
    assert texts(one)[-3:] == [
        "the gate cleared n2: no check found a fault (1 tests of [accusations] were run)",
        "strike: the report of job 7 is unproven and counts towards a lemon",
        "the strike of job 7 counts no more: the report was withdrawn (the same error on n2, n3)",
    ]
    assert one.verdict == "withdrawn"
    assert one.rule == "node-lost", "of its incident, where the report is an older one"


@pytest.mark.parametrize(
    ("report", "events", "verdict"),
    [
        ({}, [], "open"),
        ({}, [event("accusation", 5, result="cleared")], "cleared"),
        ({}, [event("accusation", 5, result="confirmed")], "confirmed"),
        ({}, [event("rejected", 5, why="it is not of job 7")], "refused"),
        ({}, [event("rejected", 5, name="accusations", why="a link")], "open"),
        ({"withdrawn": "x"}, [], "withdrawn"),
        ({"withdrawn": "x"}, [event("accusation", 5, result="cleared")], "withdrawn"),
        # The finding of a check stands.
        ({"withdrawn": "x"}, [event("accusation", 5, result="confirmed")], "confirmed"),
        # Of another incident, job, or user.
        ({}, [event("rejected", 5, name="n2.i2.json")], "open"),
        ({}, [event("rejected", 5, job=8)], "open"),
        ({}, [event("rejected", 5, uid=BOB)], "open"),
        # Older events join by node and time.
        ({}, [event("accusation", 5, result="confirmed", **OLD)], "confirmed"),
        ({}, [event("accusation", 5, result="cleared", job=0, **OLD)], "cleared"),
        ({}, [event("strike", 5, job=8, **OLD)], "open"),
    ],
)
def test_the_verdict_on_a_report(
    report: dict[str, Any], events: list[NodeEvent], verdict: str
) -> None:
    (one,) = of_node([job(7, [report], [{}])], events)
    assert one.verdict == verdict


def test_an_event_too_late_or_too_early_is_of_no_report() -> None:
    for after in (-5.0, 9000.0):
        events = [event("accusation", after, result="confirmed", **OLD)]
        assert "open" in [one.verdict for one in of_node([job(7, [{}], [{}])], events)]


@pytest.mark.parametrize(
    ("drain", "joined"),
    [
        ({"reports": BEHIND, **DRAIN}, True),
        (DRAIN, True),  # an older event: by time
        ({**DRAIN, "reports": [{"job": 8, "name": "n2.i1.json"}]}, False),
        ({**DRAIN, "class": "user"}, False),
        ({**DRAIN, "check": "lemon"}, False),  # that follows from cleared ones
    ],
)
def test_a_drain_belongs_to_the_reports_behind_it(drain: dict[str, Any], joined: bool) -> None:
    confirmed = event("accusation", 10, result="confirmed")
    found = of_node([job(7, [{}], [{}])], [confirmed, event("drain", 11, **drain)])
    assert [one.source for one in found] == (["job"] if joined else ["job", "gate"])
    assert found[0].drained == (DRAIN["reason"] if joined else "")


def test_a_lemon_is_drained_for_the_strike_of_a_report_that_was_cleared() -> None:
    found = of_node(
        [job(7, [{}], [{}])],
        [
            event("accusation", 10, result="cleared"),
            event("drain", 11, **{**DRAIN, "check": "lemon"}),
        ],
    )
    assert [(one.source, one.verdict) for one in found] == [("job", "cleared")]
    assert found[0].drained


def test_what_the_gate_found_itself_is_a_story_of_its_own() -> None:
    (one,) = of_node(
        [],
        [
            event("drain", 0, **DRAIN, placed=False),
            event("burn-in", 5, ok=True),
            event("active-run", 6, why="undrain", result="passed", told="passed: gemm"),
            event("undrain", 7, reason=DRAIN["reason"]),
        ],
    )
    assert (one.source, one.verdict, one.rule, one.job_id) == ("gate", "drained", "gemm", 7)
    assert texts(one) == [
        "to be drained, but Slurm did not take it: robust:node:gemm:-:service:job7",
        "burn-in passed",
        "active tests passed: passed: gemm",
        "undrained: every check passes on n2 (robust:node:gemm:-:service:job7)",
    ]


def test_a_drain_by_the_job_itself_has_no_event_and_its_undrain_is_told() -> None:
    undrain = event("undrain", 60, reason="robust:node:node-lost:-:none:job7", job=0, **OLD)
    (one,) = of_node([job(7, [{}], [{}])], [event("accusation", 50, result="cleared"), undrain])
    assert texts(one)[-1].startswith("undrained: every check passes on n2 (robust:node:node-lost")
    (alone,) = of_node([], [undrain])
    assert (alone.source, alone.rule, alone.job_id) == ("gate", "node-lost", 7)


def test_a_report_whose_job_has_removed_its_records_is_told_from_the_gates() -> None:
    said = {"check": "hang", "said": ["rank 3 stands still"], "seen": NOW - 120, "rule": "hang"}
    (one,) = of_node([], [event("accusation", 0, result="cleared", **said)])
    assert (one.verdict, one.rule, one.uid, one.time) == ("cleared", "hang", ADA, NOW - 120)
    assert texts(one)[:2] == [
        "job 7 reported n2: hang (rule hang, incident i1)",
        "evidence: rank 3 stands still",
    ]


def test_a_node_that_left_without_a_report() -> None:
    had = {"id": "i9", "cause": "shared", "rule": "node-lost"}
    (one,) = of_node([job(7, [], [had])], [])
    assert (one.verdict, one.evicted, one.reported) == ("unreported", True, False)
    assert texts(one)[0] == "job 7 left n2 without a report: node lost, cause shared"


@pytest.mark.parametrize(
    ("outcome", "rosters", "went_on"),
    [
        ("recovered", [], True),
        ("failed", [], False),
        ("requeued", [], False),
        ("requeued", [roster(started=NOW - 500)], False),  # of the run before
        ("requeued", [roster(started=NOW - 50, step=None)], False),
        ("requeued", [roster(started=NOW - 50)], True),
    ],
)
def test_a_job_went_on_without_the_node(
    outcome: str, rosters: list[dict[str, Any]], went_on: bool
) -> None:
    had = {"outcome": outcome, "swaps": []}
    (one,) = of_node([job(7, [{}], [had], rosters=rosters)], [])
    assert (one.progressed, one.evicted) == (went_on, outcome == "requeued")


def test_a_requeued_job_counts_its_incidents_anew() -> None:
    later = {"time": NOW - 10, "outcome": "failed"}
    (one,) = of_node([job(7, [{}], [{}, later])], [])[:1]
    assert one.progressed, "of the incident that is nearest in time"


def test_a_standby_node_is_reported_under_the_number_of_its_own_allocation() -> None:
    mine = job(9, [{"time": NOW - 100}], [{}])
    report = node_report_from(accusation(job=7))
    assert report is not None
    record = JobRecord(mine.job_id, ADA, (report,), mine.incidents)
    (one,) = of_node([record], [event("accusation", 5, result="cleared")])
    assert (one.job_id, one.of_job, one.verdict) == (7, 9, "cleared")


def test_another_users_file_about_the_job_gets_none_of_its_events() -> None:
    real, forged = job(7, [{}], [{}]), job(7, [{"evidence": ["forged"]}], [], uid=BOB)
    found = of_node([real, forged], [event("accusation", 5, result="confirmed")])
    assert {one.uid: one.verdict for one in found} == {ADA: "confirmed", BOB: "open"}


@pytest.mark.parametrize(
    ("events", "proof"),
    [
        ([], 0.0),
        ([event("accusation", 5, result="cleared")], 0.0),  # that is what makes a lemon
        ([event("accusation", 5, result="cleared", tested=True)], NOW - 95),
        ([event("accusation", 5, result="cleared", tested="yes")], 0.0),
        ([event("undrain", 5)], NOW - 95),
        ([event("repaired", 5), event("repaired", 1)], NOW - 95),
        ([event("burn-in", 5, ok=True)], NOW - 95),
        ([event("burn-in", 5, ok=1)], 0.0),
        ([event("active-run", 5, result="passed")], NOW - 95),
        ([event("active-run", 5, result="partly")], 0.0),
    ],
)
def test_proofs_that_a_node_is_good(events: list[NodeEvent], proof: float) -> None:
    assert proven_good(events) == proof


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("n2.0-1.json", "0-1"),
        ("n2.0-1.withdrawn.json", "0-1"),
        ("n22.0-1.json", ""),
        ("accusations", ""),
        (None, ""),
        (["n2.x.json"], ""),
    ],
)
def test_the_report_of_a_files_name(name: object, report: str) -> None:
    assert report_of(name, "n2") == report


def test_each_published_line_counts_once_and_foreign_ones_are_skipped() -> None:
    line = b'{"time":5,"kind":"undrain","boot":"b","data":{}}\n'
    run = b'{"time":6,"kind":"run","boot":"b","data":{}}\n'
    found = events_from(line + run + b'{"kind":"undrain"\n' + line + b"\xff\n", "n2")
    assert [(one.time, one.kind) for one in found] == [(5.0, "undrain")]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
_FIELDS = (
    *("job", "uid", "name", "rule", "check", "class", "result", "reason", "why", "said", "seen"),
    *("evidence", "told", "note", "by", "tested", "placed", "reports", "ok"),
)


def _changed(data: st.DataObject, example: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    for key in data.draw(st.lists(st.sampled_from(fields), max_size=4)):
        example = {**example, key: data.draw(_json)}
    return example


@settings(deadline=None)
@given(st.data())
def test_the_story_of_any_records_is_told_in_printable_lines(data: st.DataObject) -> None:
    reports, incidents, events = [], [], []
    for _ in range(data.draw(st.integers(0, 3))):
        example = accusation(rule="x", withdrawn="")
        reports.append(node_report_from(_changed(data, example, sorted(example))))
        had = incident(swaps=[["n2", "n3"]], rule="x")
        incidents.append(incident_from(_changed(data, had, sorted(had))))
    for kind in data.draw(st.lists(st.sampled_from(KINDS), max_size=6)):
        of = {"job": 7, "name": "n2.i1.json", "result": "confirmed", "reports": BEHIND}
        made = {"time": NOW + len(events), "kind": kind, "data": _changed(data, of, list(_FIELDS))}
        events.append(event_from(_changed(data, made, ["time", "kind", "data"]), "n2"))
    record = JobRecord(7, ADA, tuple(r for r in reports if r), tuple(i for i in incidents if i))
    found = of_node([record], [e for e in events if e])
    lines = story("n2", None, found, "", Path("/state"))
    assert all(line.isprintable() for line in lines)
    json.dumps([one.lines[0].time for one in found if one.lines], allow_nan=False)


@given(st.binary(max_size=200) | _json.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_no_events_or_good_ones(raw: bytes) -> None:
    for one in events_from(raw, "n2"):
        assert one.kind in KINDS
    assert of_node([], events_from(b'{"kind":"undrain",' + raw + b"\n", "n2")) == []


def test_a_job_that_floods_its_directory_with_reports_is_heard_as_by_the_gate() -> None:
    many = [{"incident": f"i{number}", "time": NOW + number} for number in range(50)]
    found = of_node([job(7, many, [])], [])
    assert [one.incident for one in found] == [f"i{number}" for number in range(42, 50)]


def test_a_warning_that_a_node_is_slow_is_told_and_counts_for_nothing() -> None:
    slow = {
        "swaps": [],
        "suspects": ["n2"],
        "symptom": "slow",
        "rule": "slow-rank",
        "action": "none",
        "outcome": "warned",
        "evidence": ["steps take 1 s, 2.0 times as long as before (0.5 s): rank 3 on n2 …"],
    }
    (one,) = of_node([job(7, [], [slow])], [])
    assert (one.verdict, one.evicted, one.reported) == (
        "warned", False, False,
    )  # fmt: skip
    assert one.lines[0].text == "job 7 named n2 and kept it: slow"
    assert not of_node([job(7, [], [slow])], [], "n3")
    assert not rule_rows([one])
    assert lemon([one], 0.0, "", 0, one.time) is None
    (both,) = of_node([job(7, [{"incident": "i1"}], [slow])], [])  # and the node has a fault
    assert both.verdict == "open" and both.reported
