"""The simulator: its accounts, its numbers' sources, and what each approach does about a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import assumed
from bench.simulate.approaches import APPROACHES, at, byterobust, hot_update, ours, p99_pool
from bench.simulate.events import (
    CODE,
    MACHINE,
    MEASURED,
    SAVING,
    WISH,
    Approach,
    Kind,
    SimulatedCluster,
    Time,
    faults,
    respond,
    simulate,
)
from bench.simulate.mixes import MIXES, scaled
from robust_slurm.config import Config
from robust_slurm.state_dir.records import IncidentRecord
from srun_wrapper.job.pace import STEP_FACTOR

RECORDS = Path(__file__).resolve().parents[3] / "docs" / "bench"
MIX = MIXES["byterobust"][1]
CLUSTER = SimulatedCluster(1200, 90.0, 4, 24.0, 10.0)


def numbers() -> Iterator[tuple[str, Time]]:
    for name, value in vars(assumed).items():
        if isinstance(value, Time) and value.basis == MEASURED and ".json" not in value.source:
            words = value.source.split()
            if len(words) == 2 and (RECORDS / f"{words[0]}.json").exists():
                yield name, value


def test_what_is_called_measured_is_in_the_records() -> None:
    found = dict(numbers())
    unknown = {
        name
        for name, value in vars(assumed).items()
        if isinstance(value, Time) and value.basis == MEASURED and name not in found
    }
    assert unknown == {"NONE"}
    for value in found.values():
        file, key = value.source.split()
        metric = json.loads((RECORDS / f"{file}.json").read_text())["metrics"][key]
        assert value.median == pytest.approx(metric["median"], rel=0.05, abs=1e-3), key
        assert value.p95 == pytest.approx(metric["p95"], rel=0.05, abs=1e-3), key


def test_defaults_of_settings_are_the_settings() -> None:
    assert Config().stop_tests == assumed.TESTS.median
    assert Config().standby_wait == assumed.GIVE_UP.median
    stuck = assumed.STUCK_GROUP.median - Config().hang_floor  # the look at the ranks
    assert assumed.hang(10.0).median == pytest.approx(STEP_FACTOR * 10.0 + stuck, abs=0.1)
    assert assumed.hang(0.1).median == pytest.approx(Config().hang_floor + stuck, abs=0.1)
    runs = json.loads((RECORDS / "faults-2026-11-26.json").read_text())["metrics"]
    evicted = runs["faults.false_evictions"]["median"] / runs["faults.runs"]["median"]
    assert evicted == pytest.approx(assumed.WRONG)


def test_the_ranks_end_as_on_the_nodes_that_were_measured() -> None:
    job = assumed.STOP.source.split()[1].split(".")[0]  # as in "400x4.node_crash.stop_s"
    ranks, per_node = map(int, job.split("x"))
    assert ours(ranks // per_node).stop.median == assumed.STOP.median


def test_every_time_has_a_source() -> None:
    for make in APPROACHES.values():
        for name, one in make(1200, 10.0).times():
            assert one.source or one.p95 == 0.0, name
            assert 0.0 <= one.median <= one.p95, name


@pytest.mark.parametrize("name", APPROACHES)
def test_accounts_add_up(name: str) -> None:
    for mix in ("byterobust", "llama3"):
        account = simulate(APPROACHES[name](1200, 10.0), CLUSTER, MIXES[mix][1], seed=3)
        lost = sum(account.lost.values())
        assert account.productive + lost == pytest.approx(account.wall)
        assert sum(account.by(0).values()) == pytest.approx(lost)
        assert sum(account.by(1).values()) == pytest.approx(lost)
        assert account.cumulative(account.wall) == pytest.approx(account.ettr)
        assert 0.0 <= account.worst() <= account.ettr <= 1.0
        again = simulate(APPROACHES[name](1200, 10.0), CLUSTER, MIXES[mix][1], seed=3)
        assert again == account


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.0, 3000.0),
    days=st.floats(0.01, 5.0),
    pool=st.integers(0, 4),
    name=st.sampled_from(sorted(APPROACHES)),
    shows=st.sampled_from(["exit", "gpu", "node", "nic", "mount", "hang", "slow", "nan", WISH]),
    machine=st.floats(0.0, 1.0),
    nodes=st.integers(1, 40),
)
def test_no_mix_breaks_the_accounts(
    rate: float, days: float, pool: int, name: str, shows: str, machine: float, nodes: int
) -> None:
    mix = [Kind("one", shows, rate, machine, 1.0 - machine, nodes=nodes)]
    account = simulate(APPROACHES[name](64, 10.0), SimulatedCluster(64, days, pool, 1.0, 2.0), mix)
    assert -1e-9 <= account.ettr <= 1.0
    assert account.productive + sum(account.lost.values()) == pytest.approx(account.wall)
    ends = 0.0
    for stretch in account.stretches:
        assert stretch.begin >= ends - 1e-6
        ends = stretch.begin + stretch.seconds
        assert ends <= account.wall + 1e-6


@pytest.mark.parametrize("name", APPROACHES)
def test_more_faults_never_help(name: str) -> None:
    for seed in range(5):
        ettrs = [
            simulate(APPROACHES[name](1200, 10.0), CLUSTER, scaled(MIX, factor), seed).ettr
            for factor in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
        ]
        assert ettrs == sorted(ettrs, reverse=True)


def test_a_larger_pool_never_hurts() -> None:
    ettrs = [simulate(ours(1200), CLUSTER._replace(pool=n), MIX).ettr for n in (0, 1, 4, 16, 64)]
    assert ettrs == sorted(ettrs)


def test_all_meet_the_same_faults() -> None:
    found = faults(MIX, CLUSTER, 7)
    more = faults(scaled(MIX, 2.0), CLUSTER, 7)
    known = {(fault.kind.name, fault.number) for fault in more}
    assert {(fault.kind.name, fault.number) for fault in found} <= known
    assert 120 < len(found) < 240  # 175 are expected


_SECOND = Time(1.0, 1.0, MEASURED, "")
_PLAIN = Approach(
    name="plain", what="", detect={"exit": _SECOND, "hang": _SECOND}, decide=_SECOND, stop=_SECOND,
    test={"again": Time(50.0, 50.0, MEASURED, ""), CODE: Time(7.0, 7.0, MEASURED, "")},
    replace=Time(3.0, 3.0, MEASURED, ""), short=Time(100.0, 100.0, MEASURED, ""),
    restore=_SECOND, start=_SECOND, save=assumed.NONE, interval=0.0, durable=0.0,
    tries={MACHINE: 1, CODE: 2}, evicts={"hang": 7},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "free", "restarts", "test", "replace", "taken"),
    [
        (Kind("passes", "exit", 1.0), 1, 1, 0.0, 0.0, 0),
        (Kind("named", "exit", 1.0, 1.0, named=True), 1, 1, 0.0, 3.0, 1),
        (Kind("not named", "exit", 1.0, 1.0), 1, 2, 50.0, 3.0, 1),
        (Kind("no standby", "exit", 1.0, 1.0, named=True), 0, 1, 0.0, 100.0, 1),
        (Kind("bad code", "exit", 1.0, 0.0, 1.0), 1, 3, 7.0, 0.0, 0),
        (Kind("group", "hang", 1.0, 1.0, named=True), 8, 1, 0.0, 3.0, 8),
        (Kind("group, 7 left", "hang", 1.0, 1.0, named=True), 7, 1, 0.0, 100.0, 8),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else None,
)
def test_a_fault_costs_what_is_done_about_it(
    kind: Kind, free: int, restarts: int, test: float, replace: float, taken: int
) -> None:
    phases, nodes, short = respond(_PLAIN, kind, free, 10.0, Random(0))
    assert [phases[name] for name in ("detect", "stop", "start")] == [restarts] * 3
    assert phases.get("test", 0.0) == test and phases.get("replace", 0.0) == replace
    assert nodes == taken and short is (taken > free)
    assert 5.0 <= phases["redo"] <= 15.0  # half a step to one and a half


def test_draws_keep_median_and_p95() -> None:
    time = Time(2.0, 8.0, MEASURED, "")
    dice = Random(1)
    drawn = sorted(time.draw(dice) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(2.0, abs=0.1)
    assert drawn[19_000] == pytest.approx(8.0, rel=0.05)
    assert sum(drawn) / len(drawn) == pytest.approx(time.mean, rel=0.02)


def test_mixes_have_the_papers_totals() -> None:
    dense = sum(kind.per_1000 for kind in MIX) / 1000 * 1200 * 90
    assert dense == pytest.approx(175)
    moe = sum(kind.per_1000 for kind in MIXES["byterobust-moe"][1]) / 1000 * 1200 * 30
    assert moe == pytest.approx(125)
    llama = sum(kind.per_1000 for kind in MIXES["llama3"][1]) / 1000 * 2048 * 54
    assert llama == pytest.approx(466, abs=1)
    assert p99_pool(MIX, 1200, 24.0) in (4, 5)
    for _, kinds in MIXES.values():
        for kind in kinds:
            assert kind.machine + kind.code <= 1.0 + 1e-9
            assert all(kind.shows in make(1200, 10.0).detect for make in APPROACHES.values())


def test_tables_are_read_between_their_rows() -> None:
    assert [hot_update(n).median for n in (1, 128, 256, 1024)] == [46, 46, 51, 65]
    assert at({1: 10.0, 3: 20.0}, 2) == 15.0 and at({1: 10.0, 3: 20.0}, 5) == 30.0
    assert byterobust(1200, most=True).detect["hang"].median == 3000.0


def test_saving_costs_its_share_of_the_training() -> None:
    account = simulate(ours(1200)._replace(save=_SECOND), CLUSTER, ())
    assert account.lost[SAVING, "save"] == pytest.approx((account.wall - 68.8) / 11, rel=1e-3)


def _incident(symptom: str, swaps: tuple[tuple[str, str], ...] = ()) -> IncidentRecord:
    return IncidentRecord(
        "1", "0", 1, 1.0, symptom, "node", (), (), "restart", "recovered", {}, 0, swaps=swaps
    )
