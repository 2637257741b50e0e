"""The simulation of pairing: its network, its baselines, and what it counts."""

import pytest

from bench import pairing
from bench.common import Results
from bench.pairing import FAULTS, Outcome, World


def test_ours_names_the_bad_where_the_baselines_take_long_or_blame_the_partner() -> None:
    world = World(128, 2, FAULTS["slow"], 0.05, "x")
    found = pairing.ours(world)
    assert found.named == world.bad
    assert found.rounds <= 4
    assert pairing.all_pairs(world) == (127, world.bad, world.bad, world.bad)
    assert pairing.one_round(world).named > world.bad


def test_what_is_counted() -> None:
    bad = frozenset({"a", "b"})
    outcomes = [
        Outcome(1, bad, bad, bad),
        Outcome(3, frozenset({"a", "c"}), frozenset({"a", "b", "c"}), bad),
    ]
    results = Results("pairing", quick=True)
    pairing.measure(results, "x", outcomes)
    assert results.ratios == {
        "x.exact": 0.5,
        "x.healthy_named": 0.5,
        "x.missed": 0.5,
        "x.found": 0.75,
        "x.told": 1.0,
    }
    assert results.metrics["x.seconds"].median == 2 * pairing.ROUND_S


def test_a_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "SIZES", (16,))
    results = Results("pairing", quick=True, runs=1)
    pairing.CASES["slow"](results)
    pairing.CASES["baselines"](results)
    assert results.ratios["slow.16.noise5.bad1.exact"] in (0.0, 1.0)
    assert results.metrics["all_pairs.slow.16.noise10.bad5.rounds"].median == 15
