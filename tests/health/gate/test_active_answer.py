"""The gate's use of the active tests' answer, and of a history with such tests."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.gate.active_answer import (
    OWED_S,
    answer,
    applying,
    argv,
    lately_broken,
    owed,
    passed_since,
    suspicious,
)
from health.node.system import CommandOutput, Event

NOW = 1_800_000_000.0


def row(**changes: Any) -> dict[str, Any]:
    found = {"status": "FAIL", "class": "node", "check": "active-gemm-wrong", "device": "gpu3"}
    return found | {"evidence": "2 of 9 products differ", "action": "service"} | changes


def output(code: int, *rows: Any, out: str | None = None, **more: Any) -> CommandOutput:
    data = {"findings": {"n1": list(rows)}, "cleared": [] if rows else ["n1"], **more}
    data.setdefault("measured", [{"test": "gemm"}, {"test": "local", "error": "no time"}])
    return CommandOutput(code, json.dumps(data) if out is None else out, "")


UNABLE = row(status="ERROR", check="active-error", action="none", **{"class": "tool"})


@pytest.mark.parametrize(
    ("given", "result", "statuses", "told"),
    [
        (output(0), "passed", [], "passed: gemm"),
        (output(0, row(status="PASS"), cleared=["n1"]), "passed", [], "passed: gemm"),
        (output(1, row()), "failed", ["FAIL"], "active-gemm-wrong: 2 of 9 products differ"),
        (output(1, row(), UNABLE), "failed", ["FAIL", "WARN"], "active-gemm-wrong"),
        (output(3, UNABLE), "broken", ["WARN"], "not fully tested"),
        (output(0, cleared=[], left_out=["memory: no time"]), "broken", ["WARN"], "no time"),
        # A user's or the tool's own fault is nothing against the node.
        (output(1, row(**{"class": "user"})), "broken", ["WARN"], "contradict"),
        (output(0, row()), "broken", ["WARN"], "contradict"),
        (output(1), "broken", ["WARN"], "contradict"),
        (output(1, row(check="mounts")), "broken", ["WARN"], "invalid answer"),
        (output(1, row(action="explode")), "broken", ["WARN"], "invalid answer"),
        (output(1, row(device="a b:c")), "broken", ["WARN"], "invalid answer"),
        (output(1, *[row()] * 51), "broken", ["WARN"], "51 findings"),
        (output(0, out="Segmentation fault"), "broken", ["WARN"], "invalid answer"),
        (output(0, out="[" * 100_000), "broken", ["WARN"], "invalid answer"),
        (output(0, out="[]"), "broken", ["WARN"], "invalid answer"),
        (CommandOutput(1, "", "No module of torch"), "broken", ["WARN"], "No module of torch"),
        (CommandOutput(2, "", "usage: …"), "broken", ["WARN"], "exit code 2: usage"),
        (CommandOutput(-signal.SIGSEGV, "", ""), "broken", ["WARN"], "exit code -11"),
        (CommandOutput(-signal.SIGKILL, "", ""), "owed", [], "were stopped"),
    ],
)  # fmt: skip
def test_answers(given: CommandOutput, result: str, statuses: list[str], told: str) -> None:
    found = answer(given)
    assert (found.result, [f.status for f in found.findings]) == (result, statuses)
    assert told in found.told
    assert all(f.cls == "tool" and f.action == "none" for f in found.findings if f.status == "WARN")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.sampled_from([0, 1, 3]), _JSON, _JSON)
def test_no_answer_of_another_form_closes(code: int, findings: Any, cleared: Any) -> None:
    text = json.dumps({"findings": findings, "cleared": cleared})
    assert not any(f.status == "FAIL" for f in answer(CommandOutput(code, text, "")).findings)


@given(st.sampled_from([0, 1, 3]), st.text())
def test_no_other_text_does(code: int, text: str) -> None:
    assert answer(CommandOutput(code, text, "")).result in ("broken", "passed")


def test_evidence_is_one_short_printable_line() -> None:
    found = answer(output(1, row(evidence="a\n\x1b[31mb" + "x" * 1000)))
    (one,) = found.findings
    assert one.evidence.startswith("a ?[31mbx") and len(one.evidence) == 600
    assert len(found.event_data("quick", "accusation")["told"]) <= 300


def test_the_interpreter_is_isolated() -> None:
    words = argv("/opt/t/bin/python3", "quick", "n1", 12.34)
    assert words[:4] == ["/opt/t/bin/python3", "-I", "-S", "-X"]
    assert "health.active.cli" in words
    assert words[-2:] == ["12.3", "--claimed"]
    more = argv("/p", "quick", "n1", 9, ["gemm", "local"], "/etc/other.toml")
    assert more[-4:] == ["--config", "/etc/other.toml", "gemm", "local"]


def event(kind: str, age_s: float, **data: Any) -> Event:
    return Event(NOW - age_s, kind, "b", data)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], ""),
        ([event("active-run", 9, result="owed", why="accusation")], "accusation"),
        ([event("active-run", 9, result="owed")], "owed"),
        ([event("active-run", 9, result="owed"), event("active-run", 5, result="passed")], ""),
        ([event("active-run", 9, result="passed"), event("active-run", 5, result="owed")], "owed"),
        ([event("active-run", OWED_S + 1, result="owed")], ""),
        ([event("active-run", -60, result="owed")], ""),  # a clock that went back
        ([event("active", 9, result="owed")], ""),
    ],
)
def test_what_is_owed(events: list[Event], why: str) -> None:
    assert owed(events, NOW) == why


@pytest.mark.parametrize(
    ("kind", "data", "passed"),
    [
        ("active-run", {"level": "quick", "result": "passed"}, True),
        ("active-run", {"level": "quick", "result": "partly"}, True),
        ("active-run", {"level": "long", "result": "passed"}, True),
        ("active-run", {"level": "quick", "result": "broken"}, False),
        ("active-run", {"level": "nonsense", "result": "passed"}, False),
        ("burn-in", {"level": "standard", "ok": True}, True),
        ("burn-in", {"level": "standard", "ok": False}, False),
        ("burn-in", {"level": "standard", "ok": "yes"}, False),
        ("pass", {"level": "long", "result": "passed"}, False),
    ],
)
def test_passed_since(kind: str, data: dict[str, Any], passed: bool) -> None:
    events = [event(kind, 60, **data, ran=["gemm", 7]), event(kind, 60, **data)]
    assert passed_since(events, "quick", NOW - 100) == ({"gemm"} if passed else set())
    assert not passed_since(events, "quick", NOW - 50), "before the drain"


def test_what_applies() -> None:
    assert applying(gpus=True) == {"bitwise", "gemm", "memory", "links", "local"}
    assert applying(gpus=False) == applying(gpus=True) - {"links"}


@pytest.mark.parametrize(
    ("rows", "ran"),
    [
        ([], ("gemm",)),
        ([row(status="WARN", check="active-undecided", **{"class": "tool"})], ()),
    ],
)
def test_what_ran_to_its_end(rows: list[Any], ran: tuple[str, ...]) -> None:
    assert answer(output(3, *rows, cleared=[])).ran == ran


@pytest.mark.parametrize(
    ("changes", "age_s", "lately"),
    [
        ({}, 600, True),
        ({}, 3700, False),
        ({}, -60, False),  # a clock that went back
        ({"result": "partly"}, 600, False),
        ({"result": "owed"}, 600, False),  # a job came: the next sweep tries
        ({"why": "accusation"}, 600, False),
    ],
)
def test_what_was_tried_lately(changes: dict[str, Any], age_s: float, lately: bool) -> None:
    data = {"why": "undrain", "result": "broken", "told": "no torch"} | changes
    found = lately_broken([event("active-run", age_s, **data)], NOW - 10_000, NOW)
    assert ("10 min ago" in found and "no torch" in found) is lately
    assert lately_broken([event("active-run", age_s, **data)], NOW - 300, NOW) == ""


def test_a_lower_level_is_no_proof_of_a_higher() -> None:
    passed = event("active-run", 60, level="quick", result="passed", ran=["gemm"])
    assert not passed_since([passed], "standard", NOW - 100)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_EXIT_CODE": "0"}, ""),
        ({"SLURM_JOB_EXIT_CODE": "256"}, ""),
        ({"SLURM_JOB_EXIT_CODE": "11"}, "SIGSEGV"),
        ({"SLURM_JOB_EXIT_CODE": "139"}, "SIGSEGV"),  # with a core
        ({"SLURM_JOB_EXIT_CODE": str((128 + 7) << 8)}, "SIGBUS"),
        ({"SLURM_JOB_EXIT_CODE": "0", "SLURM_JOB_DERIVED_EC": str((128 + 6) << 8)}, "SIGABRT"),
        ({"SLURM_JOB_EXIT_CODE": "15"}, ""),  # cancelled
        ({"SLURM_JOB_EXIT_CODE": "9"}, ""),
        ({"SLURM_JOB_EXIT_CODE": "x" * 5}, ""),
    ],
)
def test_suspicious_ends(env: dict[str, str], name: str) -> None:
    assert suspicious(env) == name
