"""Runs over fake fleets: who is named, who is cleared, what is left out, and when it ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_active_run import ALL, judged_of
from fake_test_worker import DIE, SILENT, Answer, connect, fleet, introduce, passed, work
from hypothesis import given
from hypothesis import strategies as st

from health.active.coordinator import meeting, procedure
from health.active.coordinator.procedure import WantedTests
from health.active.coordinator.session import TestSession
from health.active.coordinator.shares import OVERHEAD_S, rounds, share
from health.active.judging.fleet import NO_BASELINES, Baselines, FleetSpread
from health.active.judging.judge import judge
from health.active.judging.pairing import Pair
from health.active_tests import BY_NAME, LEVELS, Judged, Level, Measured

NAMES = [f"n{i}" for i in range(1, 9)]


def healthy(names: list[str] = NAMES) -> dict[str, Answer]:
    return dict.fromkeys(names, passed)


def test_all_is_well() -> None:
    said: list[str] = []
    judged = judged_of(healthy(), said=said.append)
    assert judged.cleared == set(NAMES) and not judged.named and not judged.errors
    assert said[0] == "bitwise, gemm, memory, local on 8 nodes" and said[1] == "round 1: 4 pairs"
    assert judged.left_out == ("links: no node has a GPU that torch can use",)
    by_test = [m.test for m in judged.measured]
    assert {test: by_test.count(test) for test in ALL} == {
        "bitwise": 8, "gemm": 8, "memory": 8, "links": 0, "local": 8, "pair": 8,
    }  # fmt: skip


def test_gpus_are_also_asked_for_their_links() -> None:
    judged = judged_of(healthy(["n1"]), ready={"devices": ["gpu0", "gpu1"], "backend": "nccl"})
    assert "links" in {m.test for m in judged.measured} and judged.cleared == {"n1"}
    assert judged.left_out[0] == "pair: needs two nodes that can be tested"


@pytest.mark.parametrize("bad", [1, 5, 8])
def test_the_one_whose_bits_differ_is_named_and_takes_no_part_in_pairs(bad: int) -> None:
    met: list[str] = []

    def wrong(task: dict[str, Any]) -> Any:
        if task["test"] in ("pair", "listen"):
            met.append(task["test"])
        return (
            passed(task, digests={"dense/cpu": "bb"}) if task["test"] == "bitwise" else passed(task)
        )

    judged = judged_of({**healthy(), f"n{bad}": wrong})
    assert list(judged.named) == [f"n{bad}"] and not met
    assert judged.cleared == set(NAMES) - {f"n{bad}"} and not judged.errors


@pytest.mark.parametrize("bad", NAMES)
def test_a_slow_node_is_named_by_re_pairing(bad: str) -> None:
    def slow(task: dict[str, Any]) -> Any:
        if task["test"] == "pair" and bad in task["peers"]:
            return passed(task, values={"busbw_gbps": 1.0})
        return passed(task)

    judged = judged_of(dict.fromkeys(NAMES, slow), ("pair",))
    assert list(judged.named) == [bad] and judged.cleared == set(NAMES) - {bad}
    assert judged.findings[bad][0].check == "active-pair-slow"


def test_pairs_on_shared_cpus_may_differ_by_more_than_those_of_gpus() -> None:
    def busy(task: dict[str, Any]) -> Any:
        slow = task["test"] == "pair" and "n1" in task["peers"]
        return passed(task, values={"busbw_gbps": 3.0}) if slow else passed(task)  # of 10

    answers = dict.fromkeys(NAMES, busy)
    assert judged_of(answers, ("pair",)).cleared == set(NAMES)
    gpu = {"devices": ["gpu0"], "models": ["m"], "backend": "nccl"}
    assert list(judged_of(answers, ("pair",), ready=gpu).named) == ["n1"]


def test_only_nodes_of_one_kind_are_paired_and_compared() -> None:
    """Six nodes of 8 GPUs, four of 4 that are three times as slow, and one of another model."""
    kinds = {
        **{f"a{i}": {"devices": [f"gpu{n}" for n in range(8)], "models": ["m"]} for i in range(6)},
        **{f"b{i}": {"devices": [f"gpu{n}" for n in range(4)], "models": ["m"]} for i in range(4)},
        "c0": {"devices": ["gpu0"], "models": ["other"]},
    }
    met: set[frozenset[str]] = set()

    def meets(task: dict[str, Any]) -> Any:
        if task["test"] != "pair":
            return passed(task)
        met.add(frozenset(name[0] for name in task["peers"]))
        return passed(task, values={"busbw_gbps": 30.0 if task["peers"][0][0] == "a" else 9.0})

    async def body() -> Judged:
        session = TestSession(dict.fromkeys(kinds, 1))
        await session.open("127.0.0.1")
        tasks = []
        for name, ready in kinds.items():
            said = await introduce(session.worker_env("127.0.0.1", name), backend="nccl", **ready)
            tasks.append(asyncio.create_task(work(said, meets)))
        await session.gather(5)
        judged = await procedure.run(session, list(kinds), WantedTests(("pair",), "quick", 60))
        await session.close()
        await asyncio.gather(*tasks)
        return judged

    judged = asyncio.run(body())
    assert met == {frozenset("a"), frozenset("b")}
    assert judged.cleared == set(kinds) - {"c0"} and not judged.named and not judged.errors
    assert judged.left_out == ("pair: c0 is the only node with 1 x other (nccl)",)


def test_wrong_data_between_two_names_the_one_that_does_it_again() -> None:
    def wrong(task: dict[str, Any]) -> Any:
        bad = task["test"] == "pair" and "n4" in task["peers"]
        return passed(task, wrong=["sum 3 where 2 must be"]) if bad else passed(task)

    judged = judged_of(dict.fromkeys(NAMES, wrong), ("pair",))
    assert list(judged.named) == ["n4"]
    assert judged.findings["n4"][0].check == "active-pair-wrong"
    assert judged.cleared == set(NAMES) - {"n4"}


def test_a_worker_that_dies_or_cannot_pair_is_an_error_and_its_partners_are_not() -> None:
    def dies(task: dict[str, Any]) -> Any:
        return DIE if task["test"] == "pair" else passed(task)

    def fails(task: dict[str, Any]) -> Any:
        return (
            passed(task, error="gloo: no route", values={})
            if task["test"] == "pair"
            else passed(task)
        )

    def peer(task: dict[str, Any]) -> Any:
        lonely = task["test"] == "pair" and {"n2", "n3"} & set(task["peers"])
        return passed(task, error="the peer has gone", values={}) if lonely else passed(task)

    judged = judged_of({**dict.fromkeys(NAMES, peer), "n2": dies, "n3": fails}, ("pair",))
    assert set(judged.errors) == {"n2", "n3"} and not judged.named
    assert judged.cleared == set(NAMES) - {"n2", "n3"}
    text = " ".join(judged.errors["n2"] + judged.errors["n3"])
    assert "the worker on n2 ended during pair" in text and "n3: gloo: no route" in text


def test_a_node_that_cannot_test_is_an_error_and_the_others_are_tested() -> None:
    async def body() -> Judged:
        async with fleet(healthy()) as session:
            more = TestSession({**dict.fromkeys(NAMES, 1), "n9": 1})
            await more.open("127.0.0.1")
            said = await connect(more.worker_env("127.0.0.1", "n9"))
            said.say({"hello": {"node": "n9", "local": 0, "pid": 1}})
            said.say({"unable": "torch cannot be imported"})
            await more.gather(0.2)
            alone = await procedure.run(more, ["n9"], WantedTests(ALL, "quick", 60))
            assert list(alone.errors) == ["n9"] and not alone.cleared and not alone.named
            await more.close()
            return await procedure.run(session, [*NAMES, "n9"], WantedTests(ALL, "quick", 60))

    judged = asyncio.run(body())
    assert judged.errors == {"n9": ("worker could not be run: no worker was started on n9",)}
    assert judged.cleared == set(NAMES)


@pytest.mark.parametrize(
    ("left", "tests", "waits"),
    [(0, 1, 14), (28, 1, 14), (60, 4, 14), (60, 1, 30), (150, 4, 30), (3600, 4, 56)],
)
def test_a_busy_node_is_waited_for_where_there_is_time(
    left: float, tests: int, waits: float
) -> None:
    assert meeting.patience(2.0, left, tests) == waits


def test_a_node_that_hangs_is_an_error_and_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE_S", -3.0)  # gemm 3 s, a pair 1 s
    monkeypatch.setattr(procedure, "patience", lambda seconds, *_: meeting.patience(seconds))
    judged = judged_of({**healthy(), "n2": lambda task: SILENT}, ("gemm", "pair"))
    assert "did not answer gemm within 3 s" in judged.errors["n2"][0]
    assert judged.cleared == set(NAMES) - {"n2"} and not judged.named


def test_it_ends_at_its_limit_whatever_the_workers_do() -> None:
    began = time.monotonic()
    judged = judged_of({**healthy(), "n2": lambda task: SILENT}, ("bitwise",), 3.2)
    assert time.monotonic() - began < 10 and judged.seconds < 10
    assert list(judged.errors) == ["n2"] and judged.cleared == set(NAMES) - {"n2"}


def test_a_test_that_was_never_begun_is_left_out_and_no_error() -> None:
    async def body() -> Judged:
        async with fleet(healthy()) as session:
            wanted = WantedTests(("bitwise", "gemm"), "quick", 9.0)
            one = procedure.Procedure(session, NAMES, wanted, NO_BASELINES, print)
            one._until = one._clock() + 2.9  # something has taken longer than was planned
            return judge(**(await one.measure())._asdict())

    judged = asyncio.run(body())
    assert not judged.errors and judged.cleared == set(NAMES)
    assert judged.left_out == ("gemm: not started on 8 nodes (n1,n2,n3,n4,…): 9 s had passed",)


def test_what_does_not_fit_is_left_out() -> None:
    judged = judged_of(healthy(), ALL, 9.0)
    assert {m.test for m in judged.measured} == {"bitwise", "gemm"}
    assert len(judged.left_out) == 4 and judged.cleared == set(NAMES)
    judged = judged_of(healthy(), ALL, 1.0)
    assert not judged.measured and not judged.cleared and len(judged.left_out) == 6


def test_two_nodes_that_disagree_are_undecided() -> None:
    def other(task: dict[str, Any]) -> Any:
        return passed(task, digests={"dense/cpu": "bb"})

    judged = judged_of({"n1": passed, "n2": other}, ("bitwise",))
    assert not judged.named and not judged.cleared
    assert judged.findings["n1"][0].check == "active-undecided"
    assert "3 machines can" in judged.left_out[0]
    known = Baselines({}, {"dense/cpu": "aa"})
    judged = judged_of({"n1": passed, "n2": other}, ("bitwise",), baselines=known)
    assert list(judged.named) == ["n2"] and judged.cleared == {"n1"} and not judged.left_out


def test_two_nodes_are_measured_by_the_fleet() -> None:
    def slow(task: dict[str, Any]) -> Any:
        return passed(task, values={"busbw_gbps": 1.0}) if task["test"] == "pair" else passed(task)

    answers = dict.fromkeys(("n1", "n2"), slow)
    gpu = {"devices": ["gpu0"], "models": ["m"], "backend": "nccl"}
    assert judged_of(answers, ("pair",), ready=gpu).cleared == {"n1", "n2"}
    record = Baselines({("1 x m", "pair", "busbw_gbps"): FleetSpread(10, 20)}, {})
    judged = judged_of(answers, ("pair",), baselines=record, ready=gpu)
    assert not judged.cleared and not judged.named  # one of them, and nobody can say which
    assert judged.findings["n1"][0].check == "active-undecided"


def test_with_little_time_only_suspects_and_as_many_others_are_paired() -> None:
    names = [f"n{i}" for i in range(1, 30)]

    async def body() -> Judged:
        async with fleet(healthy(names)) as session:
            wanted = WantedTests(("pair",), "quick", 9.3, suspects=("n7",))
            one = procedure.Procedure(session, names, wanted, NO_BASELINES, print)
            one._until = one._clock() + 6.0  # something has taken longer than was planned
            found = await one.measure()
            return judge(**found._asdict())

    judged = asyncio.run(body())
    assert judged.cleared == {"n7", "n1", "n2"} and not judged.errors
    assert judged.left_out == ("pair: no time for all; only the suspects and 2 others were tested",)


def test_all_slots_of_a_node_are_tested_and_one_takes_part_in_pairs() -> None:
    judged = judged_of(healthy(["n1", "n2"]), ("gemm", "pair"), slots=4)
    assert [m.test for m in judged.measured].count("gemm") == 8
    assert [m.test for m in judged.measured].count("pair") == 2
    assert judged.cleared == {"n1", "n2"} and judged.devices == {"n1": 1, "n2": 1}


@pytest.mark.parametrize("test", ["local", "pair"])
def test_the_workers_devices_are_counted_where_no_test_names_any(test: str) -> None:
    two = {"devices": ["gpu0", "gpu1"], "backend": "nccl"}
    assert judged_of(healthy(["n1", "n2"]), (test,), ready=two).devices == {"n1": 2, "n2": 2}


def test_who_has_a_loopback_address_does_not_listen() -> None:
    listened: list[str] = []

    def listens(node: str) -> Answer:
        def answer(task: dict[str, Any]) -> Any:
            if task["test"] == "listen":
                listened.append(node)
            return passed(task)

        return answer

    async def body() -> None:
        async with fleet({"n1": listens("n1"), "n2": listens("n2")}) as session:
            place = session._slots["n2", 0]
            assert place.about
            place.about = place.about._replace(host="10.0.0.2")
            until = asyncio.get_running_loop().time() + 5
            meetings = meeting.Meetings(session, {"test": "pair", "seconds": 1.0}, until)
            for pair in (Pair("n1", "n2"), Pair("n2", "n1")):
                result = await meetings.meet(pair)
                assert result.gbps == 10.0 and not result.error

    asyncio.run(body())
    assert listened == ["n2", "n2"]


@pytest.mark.parametrize(
    ("sides", "gbps", "wrong", "error"),
    [
        ([Measured("pair", "a", values={"busbw_gbps": 3.0})] * 2, 3.0, False, ""),
        ([Measured("pair", "a", values={"busbw_gbps": g}) for g in (3.0, 2.0)], 2.0, False, ""),
        ([Measured("pair", n, error="x") for n in "ab"], None, False, "a: x; b: x"),
        ([Measured("pair", "a", wrong=("3",)), Measured("pair", "b")], None, True, ""),
        ([Measured("pair", "a")] * 2, None, False, "a, b: no bandwidth in their answers"),
    ],
)
def test_two_sides_make_one_result(
    sides: list[Measured], gbps: float | None, wrong: bool, error: str
) -> None:
    found = meeting.result(Pair("a", "b"), sides)
    assert (found.gbps, found.wrong, found.error) == (gbps, wrong, error)


@given(st.sets(st.sampled_from(ALL)), st.sampled_from(LEVELS), st.floats(0, 4000))
def test_shares(tests: set[str], level: Level, limit: float) -> None:
    shares = share(tests, level, limit)
    assert set(shares.seconds) | {line.partition(":")[0] for line in shares.left_out} == tests
    assert list(shares.seconds) == [name for name in ALL if name in shares.seconds]
    cost = sum(rounds(name) * (s + OVERHEAD_S) for name, s in shares.seconds.items())
    assert cost <= limit + 1e-6
    for name, seconds in shares.seconds.items():
        declared = BY_NAME[name].seconds
        assert declared["quick"] - 1e-9 <= seconds <= declared[level] + 1e-9
    if limit >= 3700:
        assert all(shares.seconds[name] == BY_NAME[name].seconds[level] for name in tests)


def test_a_test_that_is_none() -> None:
    with pytest.raises(KeyError):
        share(["gem"], "quick", 10)
