"""The recovery ladder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Cause, Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import (
    GAVE_UP,
    NOTHING_LEFT,
    Budget,
    LadderPlan,
    Means,
    acquit,
    plan,
    suspect_nodes,
    with_suspects,
)


def crash(tail: str = "", node: str = "n1", **fields: Any) -> Diagnosis:
    values: dict[str, Any] = {"code": 1, "rank": 0} | fields
    return diagnose([Failure("crash", 1.0, 0.9, node, tail=tail, **values)])


def no_fork(node: str = "n1") -> Diagnosis:
    tail = "robust-task: cannot run 'x': [Errno 11] Resource temporarily unavailable"
    return crash(tail, node, code=2, launched=False)


def lost(*nodes: str) -> Diagnosis:
    return diagnose([Failure("node_lost", 1.0, 0.0, n, evidence=("silent",)) for n in nodes])


def hang(*suspects: str, mismatch: bool = False) -> Diagnosis:
    first = suspects[0] if suspects else ""
    return diagnose([Failure("hang", 1.0, 0.0, first, suspects=suspects, mismatch=mismatch)])


def nan(*, step: int = 9, node: str = "n1", ranks: int = 1, cause: Cause = "unknown") -> Diagnosis:
    found = diagnose([Failure("nan", 1.0, 0.5, node, r, step=step) for r in range(ranks)])
    return replace(found, cause=cause, suspects=(node,)) if cause == "node" else found


KILLED: dict[str, Any] = {"code": None, "signal": 9}
SEGV: dict[str, Any] = {"code": None, "signal": 11}
OOM = {**KILLED, "facts": ("kernel: Memory cgroup out of memory: Killed process 7 (python)",)}
ECC = "CUDA error: uncorrectable ECC error encountered"


def means(
    spares: int = 0, standby_nodes: int = 0, requeue: bool = False, max_restarts: int = 3
) -> Means:
    return Means(spares, standby_nodes, requeue, max_restarts)


def decide(history: list[Diagnosis], vacant: tuple[str, ...], have: Means) -> LadderPlan:
    """The plan for the last failure of a history without progress."""
    budget = Budget()
    for diagnosis in history:
        budget.spend(diagnosis)
    return plan(history[-1], vacant, budget, have)


@pytest.mark.parametrize(
    ("history", "vacant", "have", "action", "replace"),
    [
        ([crash(**KILLED)], (), means(), "restart", ()),
        ([crash(**KILLED)] * 2, (), means(spares=1), "restart", ()),  # its ranks move first
        ([crash(**KILLED)] * 3, (), means(spares=1), "swap_spare", ("n1",)),
        ([crash(**SEGV)] * 2, (), means(spares=1), "restart", ()),  # its ranks move first
        ([crash(**SEGV)] * 3, (), means(spares=1), "swap_spare", ("n1",)),
        ([crash(**KILLED)] * 2, (), means(), "restart", ()),  # nothing to replace it with
        ([crash(**KILLED), crash(node="n2", **KILLED)], (), means(spares=1), "restart", ()),
        ([crash("ValueError: x")], (), means(spares=1), "restart", ()),
        ([crash("ValueError: x")] * 2, (), means(spares=1), "stop", ()),
        ([crash("ValueError: x"), crash("ValueError: y")], (), means(), "restart", ()),
        ([crash(code=2, launched=False)], (), means(spares=1), "stop", ()),
        ([no_fork()], (), means(spares=1), "restart", ()),
        ([no_fork(), no_fork("n2")], (), means(spares=1), "restart", ()),
        ([no_fork()] * 2, (), means(spares=1), "swap_spare", ("n1",)),
        ([crash(ECC)], (), means(spares=1), "swap_spare", ("n1",)),
        ([crash(ECC)], (), means(standby_nodes=1), "swap_standby", ("n1",)),
        ([crash(ECC)], (), means(requeue=True), "restart", ()),
        ([lost("n2")], ("n2",), means(spares=1), "swap_spare", ("n2",)),
        ([lost("n2")], ("n2",), means(spares=1, standby_nodes=9), "swap_spare", ("n2",)),
        ([lost("n2")], ("n2",), means(standby_nodes=1), "swap_standby", ("n2",)),
        ([lost("n2", "n3")], ("n2", "n3"), means(1, 1), "swap_standby", ("n2", "n3")),
        ([lost("n2")], ("n2",), means(requeue=True), "requeue", ("n2",)),
        ([lost("n2")], ("n2",), means(), "stop", ("n2",)),
        # A suspect may stay when only the lost node can be replaced.
        ([crash(ECC)], ("n2",), means(spares=1), "swap_spare", ("n2",)),
        ([crash(ECC)], ("n2",), means(spares=2), "swap_spare", ("n2", "n1")),
        ([crash(ECC)], ("n2",), means(requeue=True), "requeue", ("n2", "n1")),
        ([hang()], (), means(spares=1), "restart", ()),
        ([hang()] * 3, (), means(spares=1), "restart", ()),
        ([hang("n1"), hang(mismatch=True)] * 2, (), means(spares=1), "stop", ()),
        ([hang("n1")], (), means(spares=1), "restart", ()),
        ([hang("n1")] * 2, (), means(spares=1), "swap_spare", ("n1",)),
        ([hang("n1", "n2")] * 2, (), means(spares=2), "restart", ()),
        ([hang("n1", "n2")] * 3, (), means(spares=2), "swap_spare", ("n1", "n2")),
        ([hang("n1", "n2")] * 3, (), means(spares=1), "swap_spare", ("n1",)),
        ([hang("n1", "n2")] * 3, (), means(), "restart", ()),
        (
            [hang("n1", "n2"), hang("n2", "n3")] * 2,
            (),
            means(9, max_restarts=9),
            "swap_spare",
            ("n2",),
        ),
        ([hang("n1", "n2")] * 3, ("n4",), means(spares=2), "swap_spare", ("n4", "n1")),
        ([crash(**KILLED)] * 4, (), means(spares=1), "stop", ()),
        ([crash(**KILLED)], (), means(max_restarts=0), "stop", ()),
        ([nan()], (), means(spares=1), "restart", ()),
        ([nan(ranks=4)], (), means(spares=1), "restart", ()),
        ([nan()] * 2, (), means(spares=1), "stop", ()),
        ([nan(), nan(step=3, node="n2", ranks=2)], (), means(spares=1), "stop", ()),
        ([nan(), nan(cause="node")], (), means(spares=1), "swap_spare", ("n1",)),
        ([nan(cause="node")], (), means(standby_nodes=1), "swap_standby", ("n1",)),
        ([nan(cause="node"), nan()], (), means(spares=1), "stop", ()),
        ([nan(), crash(**KILLED)], (), means(spares=1), "restart", ()),  # a NaN accuses nobody
        ([nan(), lost("n2")], ("n2",), means(spares=1), "swap_spare", ("n2",)),
        ([nan()], ("n2",), means(spares=2), "swap_spare", ("n2",)),
    ],
)
def test_plan(
    history: list[Diagnosis],
    vacant: tuple[str, ...],
    have: Means,
    action: str,
    replace: tuple[str, ...],
) -> None:
    chosen = decide(history, vacant, have)
    assert (chosen.action, chosen.replace) == (action, replace)
    assert chosen.why


EIO, LAUNCH = "OSError: [Errno 5] Input/output error", "CUDA error: unspecified launch failure"


def at_once(tail: str, *nodes: str, **fields: Any) -> list[Failure]:
    values: dict[str, Any] = {"code": 1} | fields
    return [Failure("crash", 1.0, 0.9, node, tail=tail, **values) for node in nodes]


def hung(*suspects: str) -> list[Failure]:
    return [Failure("hang", 1.0, 0.0, suspects[0], suspects=suspects)]


@pytest.mark.parametrize(
    ("history", "passed", "left", "withdrawn"),
    [
        # What the machine says of itself costs the node at once; on several nodes it is no machine.
        ([at_once(ECC, "n1")], (), ["n1"], []),
        ([at_once(ECC, "n1", "n2")] * 3, (), [], []),
        ([at_once(ECC, "n1"), at_once(ECC, "s1")], (), ["n1"], ["n1"]),  # the replacement, too
        ([at_once(ECC, "n1"), at_once(ECC, "s1"), at_once(ECC, "s1")], (), ["n1"], ["n1"]),
        ([at_once(ECC, "n1"), at_once(ECC, "n5")], (), ["n1", "n5"], []),  # two bad machines
        ([at_once(ECC, "n1"), at_once(ECC, "n2", "n3")], (), ["n1"], ["n1"]),
        # What a program or a file server can cause as well takes a second time on the same node.
        ([at_once(EIO, "n1")], (), [], []),
        ([at_once(EIO, "n1")] * 2, (), ["n1"], []),
        ([at_once(EIO, "n1"), at_once(LAUNCH, "n1")], (), ["n1"], []),  # a second hint
        ([at_once(EIO, "n1")] * 2, ("n1",), [], []),  # tests passed: once more
        ([at_once(EIO, "n1")] * 3, ("n1",), ["n1"], []),
        ([at_once(EIO, "n1"), at_once(EIO, "n2")] * 2, (), [], []),  # in turn
        ([at_once(EIO, "n1", "n2"), at_once(EIO, "n1")], (), [], []),
        ([at_once(EIO, "n1")] * 2 + [at_once(EIO, "s1")], (), ["n1"], ["n1"]),
        ([at_once(LAUNCH, "n1")] * 2 + [at_once(LAUNCH, "s1")] * 2, (), ["n1"], ["n1"]),
        # Another signal is mostly the program's, a SIGKILL memory: the ranks move first.
        ([at_once("", "n1", **SEGV)] * 2, (), [], []),
        ([at_once("", "n1", **SEGV)] * 3, ("n1",), ["n1"], []),
        ([at_once("", "n1", **SEGV)] * 3 + [at_once("", "s1", **SEGV)], (), ["n1"], ["n1"]),
        ([at_once("", "n1", **KILLED)] * 2, (), [], []),
        ([at_once("", "n1", **KILLED)] * 3, (), ["n1"], []),
        ([at_once("", "n1", **KILLED)] * 3, ("n1",), ["n1"], []),
        ([at_once("", "n1", **KILLED)] * 2 + [at_once("", "n2", **KILLED)] * 5, (), [], []),
        ([at_once("", "n1", **KILLED)] * 3 + [at_once("", "s1", **KILLED)], (), ["n1"], ["n1"]),
        ([at_once("", "n1", **KILLED)] * 3 + [at_once(EIO, "s1")], (), ["n1"], []),
        ([at_once("", "n1", **OOM)] * 9, (), [], []),
        ([at_once("", "n1", **KILLED), *[at_once("", "n1", **OOM)] * 9], (), [], []),
        ([at_once("", "n1", code=2, launched=False)], (), ["n1"], []),
        # Of a hang the next one acquits whoever was evicted for it.
        ([hung("n1")] * 2, (), ["n1"], []),
        ([hung("n1")] * 2 + [hung("s1")] * 2, (), ["n1"], ["n1"]),
        ([hung("n1")] * 2 + [hung("n3")], (), ["n1"], ["n1"]),
        ([hung("n1"), hung("n3"), hung("n3")], (), ["n3"], []),
    ],
)
def test_who_is_blamed_and_acquitted(
    history: list[list[Failure]], passed: tuple[str, ...], left: list[str], withdrawn: list[str]
) -> None:
    """``history``: what failed at once, one recovery after another without progress; a node of
    ``passed`` has passed tests; a node that leaves is replaced by s1, s2, …"""
    budget, gone, wrong = Budget(), list[str](), dict[str, None]()
    for failures in history:
        diagnosis = diagnose(failures, 9)
        budget.spend(diagnosis)
        diagnosis, acquitted = acquit(diagnosis, budget)
        wrong |= dict.fromkeys(acquitted)
        cleared = frozenset(passed if budget.failures > 1 else ())
        diagnosis = replace(diagnosis, cleared=cleared)
        chosen = plan(diagnosis, (), budget, means(spares=9, max_restarts=9))
        swaps = [(node, f"s{len(gone) + 1}") for node in chosen.replace]
        budget.evict(diagnosis, swaps, ())
        gone += chosen.replace
    assert (gone, list(wrong)) == (left, withdrawn)


def test_what_is_proven_is_never_withdrawn() -> None:
    budget = Budget()
    proven = replace(hang("n1"), cause="node", proven=("n1",))
    budget.spend(proven)
    budget.evict(proven, [("n1", "s1"), ("n2", "s2")], ("n2",))  # one proven bad, one lost
    budget.spend(hang("s1"))
    assert acquit(hang("s1"), budget) == (hang("s1"), ())


@pytest.mark.parametrize(
    ("history", "vacant", "code"),
    [
        ([crash("ValueError: x")] * 2, (), 0),  # the rank's own exit code
        ([crash(**KILLED)] * 4, (), 0),
        ([hang(mismatch=True)] * 2, (), GAVE_UP),  # flight recorders have shown it twice
        ([nan()] * 2, (), GAVE_UP),
        ([lost("n1")] * 4, ("n1",), GAVE_UP),
        ([lost("n1")], ("n1",), NOTHING_LEFT),
    ],
)
def test_exit_codes(history: list[Diagnosis], vacant: tuple[str, ...], code: int) -> None:
    chosen = decide(history, vacant, means())
    assert (chosen.action, chosen.code) == ("stop", code)


def test_progress_refills_everything() -> None:
    budget, have = Budget(), means(spares=1)
    for _ in range(20):
        budget.refill()
        budget.spend(crash("ValueError: x"))
        assert plan(crash("ValueError: x"), (), budget, have).action == "restart"


def test_a_refund_undoes_the_last_failure() -> None:
    """The failure was cut short by another one before anything was tried."""
    budget = Budget()
    for diagnosis in (crash("ValueError"), hang("n2")):
        budget.spend(diagnosis)
        before = dict(budget.signatures), dict(budget.nodes)
        budget.spend(diagnosis)
        budget.refund()
        budget.refund()  # of nothing
        assert (budget.signatures, budget.nodes) == before
    assert budget.failures == 2
    assert decide([crash("ValueError")] * 2, (), means()).action == "stop"
    assert plan(crash("ValueError"), (), budget, means()).action == "restart"


def test_suspects_need_two_failures_or_evidence() -> None:
    assert suspect_nodes(crash(ECC), {}) == ("n1",)
    assert suspect_nodes(crash(**KILLED), {"n1": 1}) == ()
    assert suspect_nodes(crash(**SEGV), {"n1": 2, "n2": 5}) == ()
    assert suspect_nodes(crash(**SEGV), {"n1": 3, "n2": 5}) == ("n1",)
    assert suspect_nodes(crash(**KILLED), {"n1": 2}) == ()
    assert suspect_nodes(crash(**KILLED), {"n1": 3}) == ("n1",)
    assert suspect_nodes(crash("ValueError: x"), {"n1": 5}) == ()
    assert suspect_nodes(hang(), {"": 5}) == ()
    assert suspect_nodes(nan(), {"n1": 5}) == ()
    assert suspect_nodes(nan(cause="node"), {}) == ("n1",)


def test_a_node_that_repetition_makes_a_suspect_is_named() -> None:
    eio = crash(EIO)
    assert with_suspects(eio, {"n1": 1}) is eio
    named = with_suspects(eio, {"n1": 2})
    assert (named.cause, named.suspects) == ("unknown", ("n1",))
    assert named.evidence[-1] == "2 failures on n1 without progress: a suspect by repetition alone"
    assert with_suspects(named, {"n1": 2}) is named
    assert with_suspects(crash(**KILLED), {"n1": 3}).suspects == ("n1",)
    assert with_suspects(crash("ValueError: x"), {"n1": 9}).suspects == ()
    assert suspect_nodes(named, {"n1": 2}) == ("n1",)


NODES = st.sampled_from(["n1", "n2", "n3", "n4"])
FAILED = st.one_of(
    st.builds(lambda n: crash(node=n, **KILLED), NODES),
    st.builds(lambda n, t: crash(f"ValueError: {t}", node=n), NODES, st.sampled_from("abcdef")),
    st.builds(lambda n: crash(ECC, node=n), NODES),
    st.builds(lambda ns: lost(*ns), st.lists(NODES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda ns: hang(*ns), st.lists(NODES, max_size=3, unique=True)),
    st.builds(lambda n, c: nan(node=n, cause=c), NODES, st.sampled_from(["unknown", "node"])),
)
HISTORY = st.lists(
    st.tuples(FAILED, st.booleans(), st.integers(0, 3), st.integers(0, 3), st.booleans()),
    max_size=30,
)


@settings(deadline=None, max_examples=200)
@given(HISTORY, st.integers(0, 5))
def test_any_history(
    history: list[tuple[Diagnosis, bool, int, int, bool]], max_restarts: int
) -> None:
    budget = Budget()
    in_a_row = 0
    for diagnosis, progress, spares, standby_nodes, requeue in history:
        if progress:
            budget.refill()
            in_a_row = 0
        budget.spend(diagnosis)
        vacant = diagnosis.suspects if diagnosis.symptom == "node_lost" else ()
        chosen = plan(
            diagnosis, vacant, budget, Means(spares, standby_nodes, requeue, max_restarts)
        )
        if chosen.action == "stop":
            return
        if chosen.action == "requeue":
            assert requeue and vacant and spares + standby_nodes < len(vacant)
            assert set(vacant) <= set(chosen.replace)
            return
        in_a_row += 1
        assert in_a_row <= max_restarts or diagnosis.symptom == "hang"
        assert set(vacant) <= set(chosen.replace)  # a lost node is always replaced
        if chosen.action == "restart":
            assert chosen.replace == ()
        elif chosen.action == "swap_spare":
            assert 0 < len(chosen.replace) <= spares
        else:
            assert spares < len(chosen.replace) <= spares + standby_nodes


def test_input_that_is_gone_stops_the_job() -> None:
    have = replace(means(spares=2, standby_nodes=2, requeue=True), never="it has read too much")
    assert decide([crash()], (), have) == LadderPlan(
        "stop", (), "it has read too much", rung="no-start"
    )
    end = decide([lost("n1")], ("n1",), have)
    assert (end.action, end.replace, end.rung) == ("stop", ("n1",), "no-start")


def test_other_code_is_for_the_programs_own_failures() -> None:
    """A job whose update waits must not restart without a budget."""
    have = replace(means(max_restarts=1), other_code="code c-1")
    assert decide([crash("ValueError: x")] * 3, (), have).rung == "other-code"
    for failures in ([hang()] * 3, [crash(**KILLED)] * 3, [nan()] * 3):
        assert decide(failures, (), have).rung != "other-code"
    assert decide([hang(mismatch=True)] * 3, (), have).rung == "other-code"


def test_a_job_is_never_ended_for_hanging_alone() -> None:
    for times in range(1, 9):
        chosen = decide([hang()] * times, (), means(spares=1))
        assert (chosen.action, chosen.replace) == ("restart", ())


@pytest.mark.parametrize(
    ("diagnosis", "vacant", "action"),
    [
        (crash("ValueError: x"), (), "stop"),
        (crash(ECC), (), "swap_spare"),
        (lost("n1"), ("n1",), "swap_spare"),
    ],
)
def test_a_line_that_fails_before_its_first_step_is_not_repeated(
    diagnosis: Diagnosis, vacant: tuple[str, ...], action: str
) -> None:
    """A job of sbatch --robust has helper lines, too; a bad node is evicted all the same."""
    chosen = decide([diagnosis], vacant, replace(means(1), early=True))
    assert (chosen.action, chosen.code) == (action, 0)
    assert (chosen.rung == "early") is (action == "stop")


def test_training_goes_on_with_fewer_where_nothing_replaces_a_lost_node() -> None:
    """After spares and standby nodes, before a requeue; a mere suspect stays."""
    fits: dict[str, Any] = {"not_fewer": lambda _names: ""}
    for left in (means(), means(requeue=True)):
        assert plan(lost("n1"), ("n1",), Budget(), replace(left, **fits)).rung == "shrink"
    for left in (means(spares=1), means(standby_nodes=1)):
        assert plan(lost("n1"), ("n1",), Budget(), replace(left, **fits)).rung != "shrink"
    suspect = hang("n1")
    assert plan(suspect, (), Budget(), replace(means(), **fits)).rung in ("in-place", "keep")


def test_says_why_a_job_does_not_go_on_with_fewer() -> None:
    why = replace(means(requeue=True), not_fewer=lambda names: f"no: {','.join(names)}")
    found = plan(lost("n1"), ("n1",), Budget(), why)
    assert (found.action, found.why.partition("; ")[2]) == (
        "requeue",
        "not with fewer nodes: no: n1",
    )
    off = plan(lost("n1"), ("n1",), Budget(), means(requeue=True))
    assert off.why == "no node left to replace the lost one"


def test_ranks_that_cannot_go_on_in_another_world_are_requeued() -> None:
    failed = replace(means(requeue=True), resize_failed=True)
    found = plan(crash("ValueError: mesh"), (), Budget(), failed)
    assert (found.action, found.rung, found.cause) == ("requeue", "undo-resize", found.why)
    assert plan(crash("x"), (), Budget(), replace(failed, requeue=False)).action == "restart"
    assert plan(lost("n1"), ("n1",), Budget(), failed).rung == "requeue"
