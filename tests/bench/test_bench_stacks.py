"""The synthetic ranks of bench.stacks: each case must be located right, whatever it takes."""

import pytest

from bench import stacks
from bench.common import Results


@pytest.mark.slow
def test_both_cases_are_located(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "RANKS", 4400)
    monkeypatch.setattr(stacks, "MESH", {"dp": 55, "pp": 10, "tp": 8})
    results = Results("stacks", quick=True)
    for case in stacks.CASES.values():
        case(results)
    names = ("one_stuck", "pipeline")
    assert list(results.metrics) == [
        f"{name}.{what}_s" for name in names for what in ("decode", "aggregate")
    ]
