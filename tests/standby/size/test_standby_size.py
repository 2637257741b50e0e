"""The number of standbys: against the paper's numbers, and against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standby.size.count import LossSource, SizeError, binomial, losses, plus, pool, units

MACHINES = (128, 256, 512, 1024, 2048)


def standbys(nodes: int, *sources: tuple[int, float], days: float = 1.0, q: float = 0.99) -> int:
    """``sources``: (size, events per 1,000 node-days)."""
    rates = [LossSource(size, per_1000 / 1000) for size, per_1000 in sources]
    return pool(losses(nodes, rates, days), q)


# ---------------------------------------------------------------- the paper, published rates


@pytest.mark.parametrize(
    ("per_1000", "sizes"),
    [
        (1.165, (2, 2, 3, 4, 7)),  # the ends of the range that explains ByteRobust's table 5
        (1.2, (2, 2, 3, 4, 7)),
        (1.25, (2, 2, 3, 4, 7)),
        (2.34, (2, 3, 4, 7, 11)),
        (3.79, (3, 4, 6, 9, 15)),
        (6.5, (4, 5, 8, 13, 22)),
    ],
)
def test_the_papers_pools(per_1000: float, sizes: tuple[int, ...]) -> None:
    assert tuple(standbys(nodes, (1, per_1000)) for nodes in MACHINES) == sizes


@pytest.mark.parametrize("per_1000", [1.16, 1.26])
def test_other_rates_do_not_explain_the_paper(per_1000: float) -> None:
    own = tuple(standbys(nodes, (1, per_1000)) for nodes in MACHINES[:4])
    assert own != (2, 2, 3, 4)


def test_over_eviction_wants_more_than_single_failures() -> None:
    """ByteRobust's 15 group evictions in 90 days at 1,200 machines, beside its single ones."""
    single, group = (1, 1.32), (8, 1000 * 15 / (90 * 1200))
    assert standbys(1200, single) == 5
    assert standbys(1200, single, group) == 16


# ---------------------------------------------------------------- against enumeration


def enumerated(nodes: int, sources: list[LossSource], days: float) -> dict[int, float]:
    """P(K = k) by going through all outcomes of all units."""
    coins = [
        (size, source.rate * size * days)
        for source in sources
        for count, size in units(nodes, source.size)
        for _ in range(count)
    ]
    out: dict[int, float] = {}
    for outcome in itertools.product((False, True), repeat=len(coins)):
        k = sum(size for hit, (size, _) in zip(outcome, coins, strict=True) if hit)
        p = math.prod(p if hit else 1 - p for hit, (_, p) in zip(outcome, coins, strict=True))
        out[k] = out.get(k, 0.0) + p
    return out


SMALL = st.lists(
    st.tuples(st.integers(1, 6), st.floats(0.0, 1.0)).map(lambda t: LossSource(t[0], t[1] / t[0])),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(st.integers(1, 5), SMALL, st.floats(0.01, 1.0), st.floats(0.01, 0.999))
def test_the_same_as_all_outcomes(
    nodes: int, sources: list[LossSource], days: float, quantile: float
) -> None:
    every = enumerated(nodes, sources, days)
    lost = losses(nodes, sources, days)
    for k, p in every.items():
        assert lost.at(k) == pytest.approx(p, abs=1e-12)
    assert lost.mean == pytest.approx(sum(k * p for k, p in every.items()), abs=1e-12)
    assert lost.mean == pytest.approx(
        sum(s.rate * size * size * n * days for s in sources for n, size in units(nodes, s.size))
    )
    n = pool(lost, quantile)
    assert sum(p for k, p in every.items() if k <= n) >= quantile - 1e-12
    assert sum(p for k, p in every.items() if k <= n - 1) < quantile + 1e-12


@pytest.mark.parametrize(
    ("trials", "p"),
    [(0, 0.3), (1, 0.5), (20, 0.0), (20, 1.0), (20, 1e-300), (20, 1 - 1e-16), (40, 0.9), (7, 1e-9)],
)
def test_binomial_at_its_edges(trials: int, p: float) -> None:
    found = binomial(trials, p)
    assert math.fsum(found.pmf) == pytest.approx(1.0)
    for k in range(-1, trials + 2):
        exact = math.comb(trials, k) * p**k * (1 - p) ** (trials - k) if 0 <= k <= trials else 0.0
        assert found.at(k) == pytest.approx(exact, rel=1e-9, abs=1e-28)


@pytest.mark.parametrize("p", [1e-7, 0.0012, 0.02, 0.5, 0.999])
def test_a_hundred_thousand_nodes(p: float) -> None:
    nodes = 100_000
    found = binomial(nodes, p)
    assert math.fsum(found.pmf) == pytest.approx(1.0, abs=1e-12)
    assert found.mean == pytest.approx(nodes * p, rel=1e-9)
    mean = found.mean
    variance = math.fsum((k - mean) ** 2 * q for k, q in enumerate(found.pmf, found.first))
    assert variance == pytest.approx(nodes * p * (1 - p), rel=1e-6)
    n = found.smallest(0.99)

    def exact(k: int) -> float:  # by logarithms of factorials, another way
        return math.exp(
            math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
            + k * math.log(p) + (nodes - k) * math.log1p(-p)
        )  # fmt: skip

    tail = math.fsum(exact(k) for k in range(n + 1, min(nodes, n + 5000) + 1))
    assert tail <= 0.01 < tail + exact(n)


def test_far_tails_keep_their_digits() -> None:
    def tail(n: int) -> float:
        terms = (math.comb(1000, k) * 0.001**k * 0.999 ** (1000 - k) for k in range(n + 1, 60))
        return math.fsum(terms)

    found = losses(1000, [LossSource(1, 0.001)])
    n = found.smallest(1 - 1e-12)
    assert tail(n) < 1e-12 < tail(n - 1)


# ---------------------------------------------------------------- how it must move

NODES = st.integers(1, 600)
RATE = st.floats(0.0, 0.05)
QUANTILE = st.floats(0.5, 0.9999)


@given(NODES, st.integers(0, 200), RATE, RATE, st.integers(1, 40), QUANTILE)
def test_more_of_anything_wants_no_smaller_pool(
    nodes: int, more: int, low: float, high: float, group: int, quantile: float
) -> None:
    low, high = sorted((low, high))
    rare = 0.1 / group
    one = [LossSource(1, low), LossSource(group, low * rare)]
    two = [LossSource(1, high), LossSource(group, high * rare)]
    base = losses(nodes, one)
    least = pool(base, quantile)
    assert pool(losses(nodes, two), quantile) >= least
    assert pool(losses(nodes + more, one), quantile) >= least
    assert pool(losses(nodes, one, 2.0), quantile) >= least
    assert pool(base, (1 + quantile) / 2) >= least
    assert pool(losses(nodes, one[:1]), quantile) <= least
    assert least <= nodes * 2


def test_groups_of_one_at_real_rates() -> None:
    for nodes in MACHINES:
        assert abs(standbys(nodes, (1, 2.5), (1, 4.0)) - standbys(nodes, (1, 6.5))) <= 1


def test_the_refill_time_is_the_window() -> None:
    assert standbys(1024, (1, 6.5), days=0.5) == standbys(1024, (1, 3.25))
    assert standbys(1024, (1, 1.2), days=3.0) == standbys(1024, (1, 3.6))
    assert standbys(1024, (1, 1.2), days=1 / 24) == 1
    assert standbys(1024, (8, 0.2), days=2.0) == standbys(1024, (8, 0.4))


@pytest.mark.parametrize(
    ("nodes", "size", "found"),
    [
        (16, 8, ((2, 8),)),
        (20, 8, ((2, 8), (1, 4))),
        (5, 8, ((1, 5),)),  # a switch with fewer nodes on it than it could have
        (3, 1, ((3, 1),)),
    ],
)
def test_units(nodes: int, size: int, found: tuple[tuple[int, int], ...]) -> None:
    assert units(nodes, size) == found


def test_a_small_training_below_one_switch() -> None:
    lost = losses(5, [LossSource(32, 0.01)])
    assert lost.at(5) == pytest.approx(0.05) and lost.at(0) == pytest.approx(0.95)


def test_convolution_keeps_its_place() -> None:
    found = plus(binomial(3, 1.0), binomial(2, 1.0), 8)
    assert found == (19, (1.0,))


@pytest.mark.parametrize(
    ("nodes", "sources", "days", "quantile", "text"),
    [
        (0, [LossSource(1, 0.1)], 1.0, 0.9, "1 to 100,000"),
        (100_001, [LossSource(1, 0.1)], 1.0, 0.9, "1 to 100,000"),
        (10, [LossSource(1, 0.6)], 2.0, 0.9, "600 events .* a node 1.2 times .* 48 h"),
        (100, [LossSource(8, 0.2)], 1.0, 0.9, "every group of 8 nodes 1.6 times"),
        (10, [LossSource(0, 0.1)], 1.0, 0.9, "groups of 0"),
        (10, [LossSource(1, -0.1)], 1.0, 0.9, "-0.1 per node-day"),
        (10, [LossSource(1, math.nan)], 1.0, 0.9, "nan"),
        (10, [LossSource(1, 0.1)], 0.0, 0.9, "refill time of 0 h"),
        (10, [LossSource(1, 0.1)], math.inf, 0.9, "refill time"),
        (10, [LossSource(1, 0.1)], 1.0, 1.0, "quantile 1"),
        (10, [LossSource(1, 0.1)], 1.0, 0.0, "quantile 0"),
    ],
)
def test_bad_numbers(
    nodes: int, sources: list[LossSource], days: float, quantile: float, text: str
) -> None:
    with pytest.raises(SizeError, match=text):
        pool(losses(nodes, sources, days), quantile)
