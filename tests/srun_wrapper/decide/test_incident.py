"""Incidents: times, records, lines."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import PHASES, Incident, ettr
from srun_wrapper.decide.ladder import LadderPlan


def incident(diagnosis: Diagnosis | None = None, last_good: float = 99.5) -> Incident:
    lost = Failure("node_lost", 100.0, last_good, "n3", evidence=("n3: silent",))
    return Incident("0-1", 4, diagnosis or diagnose([lost]), last_good, 100.0)


def test_phases_and_the_line() -> None:
    it = incident()
    it.marks = {"decide": 100.1, "stop": 100.3, "replace": 100.3, "launch": 101.0}
    it.marks["first_step"] = 103.0
    it.swaps.append(("n3", "n5"))
    it.step_before, it.resume_step = 120, 101
    assert it.phases() == pytest.approx(
        {
            "detect": 0.5,
            "decide": 0.1,
            "stop": 0.2,
            "test": 0.0,
            "replace": 0.0,
            "restore": 0.0,
            "launch": 0.7,
            "first_step": 2.0,
            "total": 3.5,
        }
    )
    assert it.line() == (
        "recovered from node lost on n3 in 3.50 s (detect 0.50, decide 0.10, stop 0.20, "
        "replace 0.00, launch 0.70, first_step 2.00); n5 took the ranks of n3; 20 steps lost"
    )


def test_what_the_ranks_were_restored_from_is_in_the_line() -> None:
    it = incident()
    it.marks = {"decide": 100.1, "replace": 100.3, "restore": 100.7, "launch": 101.0}
    it.restored = ("resumed step 46 from memory: 4 of 4 snapshots …", "rank 3: …")
    it.swaps.append(("n2", "s1"))
    it.step_before, it.resume_step = 47, 47
    assert "restore 0.40, launch 0.30" in it.line()
    assert it.line().endswith("; resumed step 46 from memory; s1 took the ranks of n2; 1 step lost")
    assert it.record(1, "0")["restored"] == list(it.restored)


def test_ranks_that_kept_their_process_are_a_rung_of_their_own() -> None:
    it = incident(diagnose([Failure("crash", 100.0, 99.9, "n1", rank=3, signal=9)]))
    it.plan = LadderPlan("restart", (), "no node is to blame", rung="in-place")
    it.started(8, warm=1, kept=7)
    assert "; 7 of 8 ranks kept their process, 1 started warm" in it.line()
    record = it.record(1, "0")
    assert (record["rung"], record["kept"], record["ranks"]) == ("rejoin", 7, 8)
    it.plan = LadderPlan("swap_spare", ("n1",), "a spare takes over", rung="spare")
    it.started(8, warm=1, kept=4)
    assert it.record(1, "0")["rung"] == "spare"


def test_tests_of_the_machines_are_a_phase() -> None:
    it = incident()
    it.marks = {"decide": 100.1, "stop": 100.3, "test": 104.3, "replace": 104.4}
    assert "test" not in it.line()
    it.tests = ("stop-time tests name n3 in 3.9 s",)
    assert "stop 0.20, test 4.00, replace 0.10" in it.line()
    assert it.record(1, "0")["tests"] == list(it.tests)


def test_the_record_is_json_with_every_field() -> None:
    it = incident()
    it.plan = LadderPlan("swap_spare", ("n3",), "a spare")
    it.outcome = "recovered"
    record = json.loads(json.dumps(it.record(42, "0")))
    assert {k: record[k] for k in ("id", "job", "epoch", "symptom", "cause", "action")} == {
        "id": "0-1",
        "job": 42,
        "epoch": 4,
        "symptom": "node_lost",
        "cause": "node",
        "action": "swap_spare",
    }
    assert record["suspects"] == ["n3"] and record["evidence"] == ["n3: silent"]
    assert set(record["phases"]) == {*PHASES, "total"}
    assert record["lost_steps"] is None and record["outcome"] == "recovered"
    assert incident().record(1, "0")["action"] == "none"


def test_the_record_names_the_rule_and_the_rung() -> None:
    it = incident()
    assert (it.record(1, "0")["rule"], it.record(1, "0")["rung"]) == ("node-lost", "")
    it.plan = LadderPlan("swap_spare", ("n3",), "a spare", rung="spare")
    assert it.record(1, "0")["rung"] == "spare"


def test_a_hang_without_suspects_has_a_place() -> None:
    line = incident(diagnose([Failure("hang", 100.0, 99.0, "")])).line()
    assert "  " not in line and line.startswith("recovered from hang on ")


@pytest.mark.parametrize(
    ("before", "resume", "lost"),
    [(None, 1, None), (9, None, None), (9, 10, 0), (9, 9, 1), (9, 1, 9), (9, 30, 0)],
)
def test_lost_steps(before: int | None, resume: int | None, lost: int | None) -> None:
    it = incident()
    it.step_before, it.resume_step = before, resume
    assert it.lost_steps == lost


def test_one_lost_step_is_singular() -> None:
    it = incident()
    it.step_before = it.resume_step = 7
    assert it.line().endswith("; 1 step lost")


def test_a_mark_is_set_once() -> None:
    it = incident()
    it.mark("stop")
    first = it.marks["stop"]
    assert first == pytest.approx(time.monotonic(), abs=5.0)
    it.mark("stop")
    assert it.marks["stop"] == first


@settings(deadline=None)
@given(
    st.floats(0, 1e6),
    st.floats(-5, 1e3),
    st.dictionaries(st.sampled_from(PHASES[1:]), st.floats(-10, 1e3)),
)
def test_phases_add_up(start: float, detect: float, marks: dict[str, float]) -> None:
    """Any marks in any order give no negative phase, and the sum is the total."""
    failure = Failure("node_lost", start + detect, start, "n1")
    it = Incident("0-1", 1, diagnose([failure]), start, start + detect)
    it.marks = {name: start + detect + at for name, at in marks.items()}
    phases = it.phases()
    total = phases.pop("total")
    assert all(seconds >= 0 for seconds in phases.values())
    if detect >= 0:
        assert sum(phases.values()) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize(
    ("elapsed", "unproductive", "ratio"),
    [(0.0, 0.0, None), (10.0, 0.0, 1.0), (10.0, 2.5, 0.75), (10.0, 20.0, 0.0), (10.0, -1.0, 1.0)],
)
def test_ettr(elapsed: float, unproductive: float, ratio: float | None) -> None:
    assert ettr(elapsed, unproductive) == ratio
