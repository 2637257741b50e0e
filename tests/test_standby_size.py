"""How many standbys: against the paper's numbers, against enumeration, and on the command line."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standby import paper
from standby.interval import at_least, at_most, poisson_interval
from standby.size import SizeError, Source, binomial, judge, losses, plus, pool, units

HERE = Path(__file__).parents[1]
MACHINES = (128, 256, 512, 1024, 2048)


def standbys(nodes: int, *sources: tuple[int, float], days: float = 1.0, q: float = 0.99) -> int:
    """``sources``: (size, events per 1,000 node-days)."""
    rates = [Source(size, per_1000 / 1000) for size, per_1000 in sources]
    return pool(losses(nodes, rates, days), q).standbys


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
    assert own != tuple(setting.standbys for setting in paper.SETTINGS[:4])


def test_the_table_agrees() -> None:
    rows = paper.rows()
    assert [row.setting.machines for row in rows] == list(MACHINES)
    assert [row.standbys[0] for row in rows] == [2, 2, 3, 4, 7]
    assert all(row.agrees for row in rows)
    wrong = rows[0]._replace(standbys=(3, 2, 3, 4))
    assert not wrong.agrees


def test_over_eviction_wants_more_than_single_failures() -> None:
    """ByteRobust's 15 group evictions in 90 days at 1,200 machines, beside its single ones."""
    single, group = (1, 1.32), (8, 1000 * 15 / (90 * 1200))
    assert standbys(1200, single) == 5
    assert standbys(1200, single, group) == 16
    lost = losses(1200, [Source(1, 1.32e-3), Source(8, 15 / (90 * 1200))])
    assert judge(lost, 5).shortage > 0.15  # the pool of the single rule, most of them short by more
    assert judge(lost, 5).short_by > 4


# ---------------------------------------------------------------- against enumeration


def enumerated(nodes: int, sources: list[Source], days: float) -> dict[int, float]:
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
    st.tuples(st.integers(1, 6), st.floats(0.0, 1.0)).map(lambda t: Source(t[0], t[1] / t[0])),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(st.integers(1, 5), SMALL, st.floats(0.01, 1.0), st.floats(0.01, 0.999))
def test_the_same_as_all_outcomes(
    nodes: int, sources: list[Source], days: float, quantile: float
) -> None:
    every = enumerated(nodes, sources, days)
    lost = losses(nodes, sources, days)
    for k, p in every.items():
        assert lost.at(k) == pytest.approx(p, abs=1e-12)
    assert lost.mean == pytest.approx(sum(k * p for k, p in every.items()), abs=1e-12)
    assert lost.mean == pytest.approx(
        sum(s.rate * size * size * n * days for s in sources for n, size in units(nodes, s.size))
    )
    found = pool(lost, quantile)
    n = found.standbys
    assert sum(p for k, p in every.items() if k <= n) >= quantile - 1e-12
    assert sum(p for k, p in every.items() if k <= n - 1) < quantile + 1e-12
    short = sum(p for k, p in every.items() if k > n)
    assert found.shortage == pytest.approx(short, abs=1e-12)
    assert found.shortfall == pytest.approx(
        sum((k - n) * p for k, p in every.items() if k > n), abs=1e-12
    )
    assert found.short_by * found.shortage == pytest.approx(found.shortfall)


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
    assert found.above(n) == pytest.approx(tail, rel=1e-6)


def test_far_tails_keep_their_digits() -> None:
    def tail(n: int) -> float:
        terms = (math.comb(1000, k) * 0.001**k * 0.999 ** (1000 - k) for k in range(n + 1, 60))
        return math.fsum(terms)

    found = losses(1000, [Source(1, 0.001)])
    assert tail(20) < 1e-19
    assert found.above(20) == pytest.approx(tail(20), rel=1e-9)
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
    one = [Source(1, low), Source(group, low * rare)]
    two = [Source(1, high), Source(group, high * rare)]
    base = losses(nodes, one)
    least = pool(base, quantile).standbys
    assert pool(losses(nodes, two), quantile).standbys >= least
    assert pool(losses(nodes + more, one), quantile).standbys >= least
    assert pool(losses(nodes, one, 2.0), quantile).standbys >= least
    assert pool(base, (1 + quantile) / 2).standbys >= least
    assert pool(losses(nodes, one[:1]), quantile).standbys <= least
    assert least <= nodes * 2


@given(NODES, RATE, st.integers(0, 30))
def test_one_more_standby_never_hurts(nodes: int, rate: float, n: int) -> None:
    lost = losses(nodes, [Source(1, rate), Source(8, rate / 20)])
    here, more = judge(lost, n), judge(lost, n + 1)
    assert more.shortage <= here.shortage and more.shortfall <= here.shortfall
    assert here.shortfall - more.shortfall == pytest.approx(here.shortage, abs=1e-12)
    assert here.shortage == 0 or here.short_by >= 1 - 1e-12


@given(NODES, st.floats(0.0, 0.02), st.floats(0.0, 0.02), st.integers(0, 40))
def test_groups_of_one_are_single_nodes(nodes: int, one: float, two: float, n: int) -> None:
    """Both are near the Poisson with that mean: Barbour and Hall's bound on the distance."""
    apart = losses(nodes, [Source(1, one), Source(1, two)])
    merged = losses(nodes, [Source(1, one + two)])
    assert apart.mean == pytest.approx(merged.mean)
    assert abs(apart.above(n) - merged.above(n)) <= max(one, two) + (one + two) + 1e-12


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
    lost = losses(5, [Source(32, 0.01)])
    assert lost.at(5) == pytest.approx(0.05) and lost.at(0) == pytest.approx(0.95)


def test_convolution_keeps_its_place() -> None:
    found = plus(binomial(3, 1.0), binomial(2, 1.0), 8)
    assert found == (19, (1.0,))


@pytest.mark.parametrize(
    ("nodes", "sources", "days", "quantile", "text"),
    [
        (0, [Source(1, 0.1)], 1.0, 0.9, "1 to 100,000"),
        (100_001, [Source(1, 0.1)], 1.0, 0.9, "1 to 100,000"),
        (10, [Source(1, 0.6)], 2.0, 0.9, "600 events .* a node 1.2 times .* 48 h"),
        (100, [Source(8, 0.2)], 1.0, 0.9, "every group of 8 nodes 1.6 times"),
        (10, [Source(0, 0.1)], 1.0, 0.9, "groups of 0"),
        (10, [Source(1, -0.1)], 1.0, 0.9, "-0.1 per node-day"),
        (10, [Source(1, math.nan)], 1.0, 0.9, "nan"),
        (10, [Source(1, 0.1)], 0.0, 0.9, "refill time of 0 h"),
        (10, [Source(1, 0.1)], math.inf, 0.9, "refill time"),
        (10, [Source(1, 0.1)], 1.0, 1.0, "quantile 1"),
        (10, [Source(1, 0.1)], 1.0, 0.0, "quantile 0"),
    ],
)
def test_bad_numbers(
    nodes: int, sources: list[Source], days: float, quantile: float, text: str
) -> None:
    with pytest.raises(SizeError, match=text):
        pool(losses(nodes, sources, days), quantile)


# ---------------------------------------------------------------- the interval of a rate


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [  # Garwood's table (half chi-square quantiles), 95 %
        (0, 0.0, 3.6889),
        (1, 0.0253, 5.5716),
        (2, 0.2422, 7.2247),
        (3, 0.6187, 8.7673),
        (10, 4.7954, 18.3904),
        (50, 37.1110, 65.9188),
        (100, 81.3640, 121.6268),
    ],
)
def test_garwoods_interval(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), abs=6e-5)


@given(st.integers(0, 3000), st.floats(0.5, 0.999))
def test_an_interval_leaves_out_what_it_says(count: int, confidence: float) -> None:
    low, high = poisson_interval(count, confidence)
    rare = (1 - confidence) / 2
    assert low <= count < high
    assert at_most(count, high) == pytest.approx(rare, rel=1e-6)
    assert count == 0 or at_least(count, low) == pytest.approx(rare, rel=1e-6)


# ---------------------------------------------------------------- the command line


def robust_standby(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "standby.cli", *words],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer(*words: str) -> dict[str, Any]:
    done = robust_standby("size", *words, "--json")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["version"] == 1
    return data


def test_it_says_how_many() -> None:
    done = robust_standby("size", "--nodes", "1024", "--rate", "1.2")
    assert done.returncode == 0 and not done.stderr
    assert "1024 nodes: keep 4 standbys (enough with probability 0.99)" in done.stdout
    assert "not counted: --group-rate, --switch-rate" in done.stdout


def test_both_pools_are_held_against_all_losses() -> None:
    words = ("--nodes=1200", "--rate=1.32", "--group-rate=0.1389", "--switch-rate=0.01")
    [case] = answer(*words)["cases"]
    assert [cause["size"] for cause in case["causes"]] == [1, 8, 32]
    assert [cause["units"] for cause in case["causes"]] == [1200, 150, 38]
    assert case["single"]["standbys"] == 5 and case["single"]["shortage"] > 0.15
    assert case["all"]["shortage"] <= 0.01
    lost = losses(1200, [Source(1, 1.32e-3), Source(8, 1.389e-4), Source(32, 1e-5)])
    assert case["all"]["standbys"] == pool(lost).standbys
    assert case["mean"] == pytest.approx(lost.mean)
    shown = robust_standby("size", *words).stdout
    assert "single nodes alone" in shown and "all losses" in shown


def test_sizes_refill_and_quantile_are_used() -> None:
    words = ("--nodes=512", "--rate=6.5", "--group=4", "--group-rate=0.2", "--switch=16")
    data = answer(*words, "--switch-rate=0.1", "--refill=6", "--quantile=0.999")
    lost = losses(512, [Source(1, 6.5e-3), Source(4, 2e-4), Source(16, 1e-4)], 0.25)
    assert data["cases"][0]["all"]["standbys"] == pool(lost, 0.999).standbys
    assert (data["refill_hours"], data["quantile"], data["measured"]) == (6.0, 0.999, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate=0.0012",), "a node fails once in 2,283 years"),
        (("--rate=400",), "goes with p = 0.4 within the refill time, and is counted once"),
    ],
)
def test_doubts_are_said(words: tuple[str, ...], said: str) -> None:
    done = robust_standby("size", "--nodes=100", *words)
    assert done.returncode == 0 and said in done.stdout


def test_the_papers_table() -> None:
    done = robust_standby("size", "--table")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["1024", "256B,", "TP", "8,", "DP", "128,", "PP", "16", *"4 4 7 9 13".split()] in rows  # noqa: SIM905
    assert ["2048", "7", "11", "15", "22"] in rows
    data = answer("--table")
    assert [row["ours"] for row in data["settings"]][:2] == [[2, 2, 3, 4], [2, 3, 4, 5]]
    assert [rate["per_1000"] for rate in data["rates"]] == [1.2, 2.34, 3.79, 6.5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no command"),
        ("resize", "no such command: 'resize'"),
        ("size", "--nodes N"),
        ("size --nodes 10", "--rate R, or have it measured, --from-ledger"),
        ("size --nodes 10 --rate 1 --from-ledger", "one of the two"),
        ("size --nodes 0 --rate 1", "not a number of nodes"),
        ("size --nodes 100001 --rate 1", "not a number of nodes"),
        ("size --nodes 1e3 --rate 1", "not a number of nodes"),
        ("size --nodes -5 --rate 1", "--nodes"),
        ("size --nodes 10 --rate -1", "--rate"),
        ("size --nodes 10 --rate nan", "not a number: 'nan'"),
        ("size --nodes 10 --rate inf", "not a number: 'inf'"),
        ("size --nodes 10 --rate one", "not a number: 'one'"),
        ("size --nodes 10 --rate 2000", "are the units right?"),
        ("size --nodes 10 --rate 1 --quantile 99", "like 0.99"),
        ("size --nodes 10 --rate 1 --quantile 1", "like 0.99"),
        ("size --nodes 10 --rate 1 --refill 0", "above 0"),
        ("size --nodes 10 --rate 1 --group 8", "--group needs --group-rate"),
        ("size --nodes 10 --rate 1 --switch 8", "--switch needs --switch-rate"),
        ("size --nodes 10 --rate 1 --group 0 --group-rate 1", "not a number of nodes"),
        ("size --nodes 10 --rate 1 --node-days 5 --since 3", "--node-days, --since: only with"),
        ("size --nodes 10 --from-ledger --group-rate 900", "are the units right?"),
        ("size --nodes 10 --from-ledger --state-dir /no/such", "/no/such is no directory"),
        ("size --nodes 10 --rate 1 --quant 0.9", "unrecognized arguments"),
        ("size --nodes 10 --rate 1 7", "unrecognized arguments: 7"),
        ("size --table --rate 0", "--table takes no --rate"),
        ("size --table --nodes 5 --refill 3", "--table takes no --nodes, --refill"),
    ],
)
def test_wrong_usage(words: str, said: str) -> None:
    done = robust_standby(*words.split())
    assert done.returncode == 2
    assert said in done.stderr and not done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("size", "--help")])
def test_help(words: tuple[str, ...]) -> None:
    done = robust_standby(*words)
    assert done.returncode == 0 and "usage: robust-standby" in done.stdout


@pytest.mark.parametrize("words", ["--table", "--table --json", "--nodes 100 --rate 1"])
def test_a_reader_that_has_enough_is_no_error(words: str) -> None:
    """``robust-standby size … | head``: nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "standby.cli", "size", *words.split()]
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
