"""Stop-time tests: when they are due, and what is made of what they say (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from health.active_tests import Judged
from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import TESTED
from srun_wrapper.decide.failure import Failure
from srun_wrapper.orders.machine_tests import (
    MachineResults,
    conclusive,
    due,
    read,
    with_bad_machines,
)


def crash(tail: str = "", code: int | None = 1, signum: int | None = None, **more: Any) -> Failure:
    return Failure("crash", 10.0, 9.0, "n3", 2, code, signum, tail, **more)


NAN = Failure("nan", 10.0, 9.0, "n3", 2, evidence=("loss of rank 2 on n3 is nan at step 7",))
HANG = Failure("hang", 10.0, 0.0, "", evidence=("no rank moves",))
LOST = Failure("node_lost", 10.0, 9.0, "n3", evidence=("n3: silent",))
TRACE = "Traceback (most recent call last):\n  File 'train.py', line 3\n"


@pytest.mark.parametrize(
    ("failure", "failures", "tested", "expected"),
    [
        (NAN, 1, False, True),  # at once
        (NAN, 2, True, False),  # asked before, and nothing came of it
        (crash(code=3), 1, False, False),  # mostly transient
        (crash(code=3), 2, False, True),
        (crash(code=3), 2, True, False),
        (crash(code=None, signum=11), 2, False, True),
        (crash(TRACE + "RuntimeError: loss is not finite"), 2, False, True),
        (crash(TRACE + "[rank2]: TypeError: forward() takes 2"), 2, False, False),
        (crash(TRACE + "ModuleNotFoundError: No module named 'x'"), 5, False, False),
        (crash("CUDA error: uncorrectable ECC error encountered"), 2, False, False),  # blamed
        (crash("no such file", 2, launched=False), 2, False, False),
        (HANG, 1, False, False),
        (HANG, 2, False, True),
        (LOST, 2, False, False),
    ],
)
def test_due(failure: Failure, failures: int, tested: bool, expected: bool) -> None:
    assert due(diagnose([failure], 8), failures, tested) is expected


@pytest.mark.parametrize("tests", ["now", "only"])
def test_a_rule_may_want_a_test_at_once(tests: Any) -> None:
    """Suspect a peer that others name, and the node of a GPU that another process uses."""
    found = replace(diagnose([crash(code=None, signum=11)], 8), tests=tests)
    assert due(found, 1, False) and not due(found, 1, True)


def test_used_up_memory_is_no_reason_for_a_test() -> None:
    fact = "Memory cgroup out of memory: Killed process 7 (python)"
    failure = replace(crash(code=None, signum=9), facts=(fact,))
    assert not due(diagnose([failure], 8), 2, False)
    assert due(diagnose([replace(failure, facts=())], 8), 2, False)


def judged(**more: Any) -> Judged:
    empty: dict[str, Any] = {
        "findings": {}, "named": {}, "cleared": frozenset(), "errors": {}, "left_out": (),
        "seconds": 4.2,
    }  # fmt: skip
    return Judged(**(empty | more))


def test_a_named_machine_leaves() -> None:
    found = read(
        judged(named={"n3": ("gemm: wrong",) * 9}, cleared=frozenset({"n1"})), ["n1", "n3"], "nan"
    )
    assert found.lines[0] == "stop-time tests name n3 in 4.2 s"
    assert found.lines.count("n3: gemm: wrong") == 4
    diagnosis = with_bad_machines(diagnose([NAN]), found, TESTED)
    assert (diagnosis.cause, diagnosis.suspects) == ("node", ("n3",))
    assert diagnosis.rule == "tests"
    assert "loss of rank 2 on n3 is nan at step 7" in diagnosis.evidence
    budget = ladder.Budget()
    for means, action in (
        (ladder.Means(1, 0, True, 0), "swap_spare"),  # whatever was tried before
        (ladder.Means(0, 1, True, 3), "swap_standby"),
        (ladder.Means(0, 0, True, 3), "requeue"),
        (ladder.Means(0, 0, False, 3), "stop"),
    ):
        budget.spend(diagnosis)
        plan = ladder.plan(diagnosis, (), budget, means)
        assert (plan.action, plan.replace) == (action, ("n3",))
    assert plan.why.startswith("a node is bad (n3), no spare")


def test_a_machine_that_is_named_among_several_suspects_is_reported() -> None:
    several = diagnose([Failure("hang", 1.0, 0.0, "n1", suspects=("n1", "n2"))], 4)
    assert several.unreported == {"n1", "n2"}
    found = with_bad_machines(several, MachineResults({"n1": ("gemm: wrong",)}, ()), TESTED)
    assert found.proven == ("n1",) and "n1" not in found.unreported


def test_when_all_pass_nobody_is_reported() -> None:
    found = read(judged(cleared=frozenset({"n1", "n2", "n3"})), ["n1", "n2", "n3"], "nan")
    assert found.lines == ("3 of 3 nodes passed stop-time tests in 4.2 s",)
    diagnosis = with_bad_machines(diagnose([NAN]), found, TESTED)
    assert (diagnosis.cause, diagnosis.suspects) == ("unknown", diagnose([NAN]).suspects)
    budget = ladder.Budget()
    budget.spend(diagnosis)
    assert ladder.plan(diagnosis, (), budget, ladder.Means(1, 1, True, 3)).action == "restart"
    budget.spend(diagnosis)
    assert ladder.plan(diagnosis, (), budget, ladder.Means(1, 1, True, 3)).action == "stop"


def test_what_could_not_be_tested_blames_nobody() -> None:
    why = ("torch cannot be imported",)
    found = read(judged(errors={"n1": why, "n2": why}), ["n1", "n2"], "crash")
    assert found == MachineResults(
        {},
        (
            "stop-time tests could not be run (in 4.2 s)",
            "could not be tested: torch cannot be imported",
        ),
    )


def test_the_slow_is_to_blame_for_a_hang_only() -> None:
    named = {
        "n2": ("active-pair-slow: 0.1",),
        "n3": ("active-gemm-slow cpu: 1", "active-gemm-wrong"),
    }
    found = read(judged(named=named), ["n1", "n2", "n3"], "nan")
    assert found.named == {"n3": ("active-gemm-wrong",)}
    assert "n2 is slow, which does not explain the failure: active-pair-slow: 0.1" in found.lines
    assert set(read(judged(named=named), ["n1", "n2", "n3"], "hang").named) == {"n2", "n3"}


def test_a_bad_spare_is_no_cause_and_takes_no_place() -> None:
    found = read(judged(named={"n4": ("active-gemm-wrong",)}), ["n1", "n2"], "nan")
    assert (dict(found.named), found.idle) == ({}, ("n4",))
    assert any(line.startswith("n4 had no ranks") for line in found.lines)
    assert with_bad_machines(diagnose([NAN]), found, TESTED).cause == "unknown"


def test_what_was_not_tested_is_said() -> None:
    left = judged(cleared=frozenset({"n1"}), left_out=("pair: no time",))
    assert "skipped: pair: no time" in read(left, ["n1"], "nan").lines


@pytest.mark.parametrize(
    ("named", "cleared", "expected"),
    [
        ({"n1": ("x",)}, set(), True),
        ({}, {"n1", "n2"}, True),
        ({}, {"n1"}, False),  # n2 could not be tested
        ({}, set(), False),
    ],
)
def test_conclusive(named: dict[str, tuple[str, ...]], cleared: set[str], expected: bool) -> None:
    assert conclusive(MachineResults(named, (), frozenset(cleared)), ["n1", "n2"]) is expected


def test_failing_twice_on_one_node_evicts_it_unless_it_has_just_passed_tests() -> None:
    sigbus = diagnose([crash(code=None, signum=7)])
    assert ladder.suspect_nodes(sigbus, {"n3": 2}) == ("n3",)
    passed = with_bad_machines(sigbus, MachineResults({}, (), frozenset({"n1", "n3"})), TESTED)
    assert ladder.suspect_nodes(passed, {"n3": 2}) == ()
    assert ladder.suspect_nodes(passed, {"n3": 3}) == ("n3",)
