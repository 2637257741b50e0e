"""Lemons and false alarms: which nodes belong to the exclude list, and which rules are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from status_records import NOW
from suspicion_records import ADA, BOB, EVE, event, job, of_node

from robust_slurm.state_dir.files import JobRecord
from robust_slurm.state_dir.node_events import NodeEvent
from status.lemons import Lemon, lemon, order, votes
from status.rules import RuleRow, rule_rows
from status.story import proven_good

READER, DAY = EVE, 86400.0
NOT_ON: dict[str, Any] = {"outcome": "failed"}


def two(**changes: Any) -> list[JobRecord]:
    """Jobs of two users that both went on without n2."""
    return [job(7, [{}], [{}]), job(8, [changes], [{}], uid=BOB)]


def row(jobs: list[JobRecord], events: list[NodeEvent], reader: int = READER) -> Lemon:
    found = lemon(of_node(jobs, events), proven_good(events), "", reader, NOW)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("jobs", "events", "exclude"),
    [
        (two(), [], True),
        # The gate's checks found nothing: that is a strike, and what makes a lemon.
        (two(), [event("accusation", 5, result="cleared"), event("strike", 5)], True),
        (two(), [event("accusation", 5, result="confirmed")], True),
        # Proofs since; an older one does not count.
        (two(), [event("accusation", 5, result="cleared", tested=True)], False),
        (two(), [event("undrain", 5)], False),
        (two(), [event("repaired", 5)], False),
        (two(), [event("burn-in", 5, ok=True)], False),
        (two(), [event("burn-in", 5, ok=False)], True),
        (two(), [event("repaired", -5)], True),
        (two(time=NOW), [event("undrain", 50)], False),  # one of them after it: no longer two
        # Too old, or of a time to come.
        (two(time=NOW - 27 * DAY), [], True),
        (two(time=NOW - 29 * DAY), [], False),
        (two(time=NOW + 60), [event("undrain", -5)], True),  # two clocks differ
        (two(time=NOW + DAY), [], False),
        # Taken back, or no report at all.
        (two(withdrawn="the same error on n3"), [], False),
        (two(), [event("rejected", 5, why="it is not of job 7")], False),
        # One job; two jobs of one user; two of users of which one did not go on.
        (two()[:1], [], False),
        ([job(7, [{}], [{}]), job(8, [{}], [{}])], [], False),
        ([job(7, [{}], [{}]), job(8, [{}], [NOT_ON], uid=BOB)], [], False),
        ([job(7, [{}], []), job(8, [{}], [], uid=BOB)], [], False),  # unknown whether they did
        ([*two(), job(9, [], [{"id": "i9"}], uid=EVE)], [], True),
    ],
)
def test_which_nodes_are_to_be_excluded(
    jobs: list[JobRecord], events: list[NodeEvent], exclude: bool
) -> None:
    assert row(jobs, events).exclude is exclude


@pytest.mark.parametrize(
    ("jobs", "reader", "count"),
    [
        ([], ADA, 0),
        ([(7, ADA), (8, ADA), (9, ADA)], BOB, 1),  # a user can lie
        ([(7, ADA), (8, ADA), (9, ADA)], ADA, 3),  # but not to himself
        ([(7, ADA), (8, BOB), (9, BOB)], ADA, 2),
        ([(7, -1), (8, -1)], ADA, 0),  # not known whose
    ],
)
def test_votes(jobs: list[tuple[int, int]], reader: int, count: int) -> None:
    assert votes(jobs, reader) == count


def test_the_readers_own_jobs_are_enough_for_his_own_list() -> None:
    jobs = [job(7, [{}], [{}]), job(8, [{}], [{}])]
    assert row(jobs, [], reader=ADA).exclude and not row(jobs, [], reader=BOB).exclude


def test_a_row_counts_jobs_and_verdicts() -> None:
    jobs = [
        *two(),
        job(9, [{"withdrawn": "the same error on n3"}], [{}], uid=EVE),
        job(10, [{"time": NOW}], [NOT_ON]),
    ]
    events = [
        event("accusation", 5, result="cleared"),
        event("accusation", 6, result="confirmed", job=8, uid=BOB),
    ]
    found = lemon(of_node(jobs, events), 0.0, "a reason", READER, NOW)
    assert found == Lemon(
        name="n2",
        jobs=3,
        users=2,
        progressed=2,
        confirmed=1,
        cleared=1,
        withdrawn=1,
        newest=NOW,
        proven_good=None,
        drained="a reason",
        exclude=True,
    )


def test_a_node_that_nobody_reported_is_no_row() -> None:
    assert lemon(of_node([job(7, [], [{}])], []), 0.0, "", READER, NOW) is None


def test_the_worst_come_first() -> None:
    def made(name: str, users: int, progressed: int, exclude: bool, cleared: int = 0) -> Lemon:
        return Lemon(name, 3, users, progressed, 0, cleared, 0, NOW, None, "", exclude)

    rows = [
        made("n5", 3, 1, False),
        made("n4", 1, 1, False),
        made("n3", 2, 2, True, cleared=2),
        made("n2", 2, 2, True),
        made("n1", 2, 3, True),
    ]
    assert [each.name for each in order(rows)] == ["n1", "n2", "n3", "n5", "n4"]


def test_false_alarms_by_rule() -> None:
    jobs = [
        job(7, [{"rule": "node-lost"}], [{}]),
        job(8, [{"rule": "signal", "withdrawn": "the same error on n3"}], [{}]),
        # Twice in one job: once, and by its worst verdict.
        job(9, [{"rule": "signal"}, {"rule": "signal", "incident": "i2"}], [{"rule": "signal"}]),
        job(10, [{"rule": "signal"}], []),
        job(11, [], [{"rule": "node-lost"}]),  # left without a report
        job(12, [{}], []),  # of an older version
    ]
    events = [
        event("accusation", 5, result="confirmed"),
        event("accusation", 6, result="cleared", job=9),
        event("accusation", 7, result="confirmed", job=9, name="n2.i2.json"),
        event("drain", 900, check="gemm", reason="robust:node:gemm:-:service:job0"),
    ]
    assert rule_rows(of_node(jobs, events)) == [
        RuleRow("signal", 3, 2, 1, 0, 1, 0, 1, false_alarms=1, false_share=0.5),
        RuleRow("", 1, 0, 0, 0, 0, 0, 1, false_alarms=0, false_share=None),
        RuleRow("node-lost", 1, 2, 1, 0, 0, 0, 0, false_alarms=0, false_share=0.0),
    ]
    assert rule_rows([]) == []
