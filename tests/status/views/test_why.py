"""Each restart as one paragraph: what failed, how it was known, what it cost, what to do."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from status_records import NOW, incident

from robust_slurm.state_dir.progress import JobRun
from robust_slurm.state_dir.records import incident_from
from status.accounts.timeline import JobHistory, account
from status.model import JobReport
from status.render import print_job
from status.views.why import paragraphs

SPENT = {"detect": 2.0, "stop": 1.0, "first_step": 7.0, "total": 10.0}
ODD = "{nodes:>999999999}{0}"  # a record's text is none of our forms
SWAP = {"swaps": [["n2", "s1"]], "rule": "node-lost", "restored": ["4 of 4 ranks from memory"]}


def told(**changes: Any) -> str:
    one = incident_from(incident(phases=SPENT, **{"lost_steps": 1, **changes}))
    assert one is not None
    run = JobRun(NOW - 900, "0", "train", 4, 8, NOW - 890, NOW, "completed")
    made = account(JobHistory(7, "llm", "ada", 1, False, [run], [one], step_time=0.5), NOW)
    (text,) = paragraphs(made, "/state/jobs/7/robust-srun.log")
    assert "\n" not in text and "{" not in text.replace(ODD, "") and "  " not in text
    return text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            SWAP,
            ["Restart 1 of job 7, ", ": n2 stopped answering.", "2.0 s after the last sign of",
             "rule node-lost applied: a node does not answer", "“silent for 3 s”; “ping failed”",
             "The node is to blame.", "s1 took the ranks of n2", "restored: 4 of 4 ranks",
             "It cost 10 s without new steps (detect 2.0 s, stop 1.0 s, first step 7.0 s), 1 step "
             "done twice, 0.02 GPU-hours", "`robust-status n2` shows what became of it"],
        ),
        (
            {"symptom": "crash", "cause": "user", "suspects": [], "action": "restart",
             "why": "no node is to blame", "lost_steps": 3},
            ["ranks failed.", "The program, its settings or its data are to blame.",
             "(no node is to blame)", "3 steps done twice", "correct the program",
             "/robust-srun.log"],
        ),
        (
            {"symptom": "hang", "cause": "shared", "suspects": [], "lost_steps": None},
            ["no rank made a step any more.", "and no node.", "steps done twice not known",
             "ask the operators"],
        ),
        (
            {"action": "requeue", "outcome": "requeued", "lost_steps": None},
            ["The job was requeued without n2", "not known"],
        ),
        (
            {"action": "stop", "outcome": "gave up: 3 recoveries in a row brought no progress"},
            ["The job was ended", "Outcome: gave up: 3 recoveries"],
        ),
        (
            {"symptom": "slow", "outcome": "warned", "cause": "unknown"},
            ["Warning 1 of job 7", "Nothing was done: the job went on.", "It cost no time."],
        ),
        (
            {"symptom": "slow", "outcome": "warned", "cause": "node", "swaps": []},
            ["That points to the node; it stayed in the job.", "the job went on.",
             "What you can do: watch whether it returns on the same node; `robust-status n2`"],
        ),
        (
            {"outcome": "observed: would restart in place", "cause": "unknown"},
            ["Nothing was done (mode = observe); would restart in place."],
        ),
        (
            {"symptom": "node_lost", "outcome": "observed: would requeue", "cause": "node"},
            ["The node is to blame.", "Nothing was done (mode = observe); would requeue."],
        ),
        (
            {"symptom": "update", "cause": "ordered", "suspects": [], "lost_steps": 0},
            ["the code was updated", "It was ordered.", "no step done twice"],
        ),
        ({"suspects": [f"n{n}" for n in range(9)]}, ["n0, n1, n2, n3 and 5 more nodes"]),
        ({"suspects": [f"n{n}" for n in range(5)]}, ["n0, n1, n2, n3 and 1 more node "]),
        ({"evidence": ["a"] * 9}, ["and 5 more lines"]),
        ({"symptom": ODD, "cause": "{node}", "evidence": []}, [f": {ODD}."]),
    ],
)  # fmt: skip
def test_a_paragraph(changes: dict[str, Any], parts: list[str]) -> None:
    text = told(**changes)
    assert [part for part in parts if part not in text] == []


GUESS = "newest file written /run/ckpt_40.pt 4 min before"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lost_steps": 12}, "about 12 steps done twice (estimate: newest file written /run/ckpt_"),
        (
            {"lost_steps": None, "lost_s": 240.0, "steps_seen": False},
            "first step not seen), about 4 min of training done twice (estimate: newest file wri",
        ),
    ],
)
def test_what_is_estimated_is_called_so(changes: dict[str, Any], part: str) -> None:
    text = told(estimate=GUESS, **changes)
    assert part in text and "It cost about " in text and "cost no time" not in text


def test_the_list_of_incidents_marks_estimates() -> None:
    one = incident_from(incident(lost_steps=None, lost_s=240.0, estimate=GUESS, steps_seen=False))
    assert one is not None
    for wide in (False, True):
        to = io.StringIO()
        print_job(
            JobReport(NOW, "", 7, (), (one,), ()), Console(width=220 if wide else 130, file=to)
        )
        assert "~4 min" in to.getvalue()
        assert not wide or ("not seen" in to.getvalue() and GUESS in to.getvalue())


def test_the_list_of_incidents_tells_a_change_of_the_world() -> None:
    """In a narrow terminal as well, which has no lines below the table."""
    one = incident_from(incident(action="shrink", swaps=[], resized=[4, 3]))
    assert one is not None
    for wide in (False, True):
        to = io.StringIO()
        out = Console(width=200 if wide else 110, file=to)
        print_job(JobReport(NOW, "", 7, (), (one,), ()), out)
        assert "4→3" in to.getvalue()
