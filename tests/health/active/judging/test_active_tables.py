"""Tables of a run of active tests, as a person sees them."""

from __future__ import annotations

import io

import pytest

from health.active.judging import fleet, tables
from health.active.judging.profiles import floor
from health.active_tests import Judged, Measured
from health.finding import Finding
from robust_slurm.command_line.screen import console


def test_a_large_table_shows_what_did_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_ROWS", 3)
    made = [Measured("gemm", f"n{i}", "gpu0", "m", {"bf16_tflops": 1.0}) for i in range(6)]
    made[4] = made[4]._replace(wrong=("row 3",))
    warned = Finding("WARN", "tool", "active-undecided", "", "who knows", "none")
    errors = {f"n{i}": (f"the worker on n{i} has not come",) for i in (7, 8, 9)}
    judged = Judged(
        {"n1": (warned,)},
        {"n4": ("active-gemm-wrong: row 3",)},
        frozenset({"n0"}),
        errors,
        ("x",),
        1.0,
        tuple(made),
    )
    file = io.StringIO()
    nodes = [f"n{i}" for i in range(10)]
    tables.show(judged, nodes, fleet.NO_BASELINES, floor, console(file))
    text = file.getvalue()
    assert "5 values that passed are not shown" in text and "n4" in text and "n5" not in text
    assert "n1: active-undecided: who knows" in text and "skipped: x" in text
    assert "could not test n[7-9]: the worker on n7 has not come" in text
    assert "10 nodes: 1 passed, 1 bad, 8 not decided, 1.0 s" in text
