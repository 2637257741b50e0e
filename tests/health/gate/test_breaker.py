"""The circuit breaker: never more drains than the limits, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from health.checks import ALL
from health.gate.breaker import (
    HARD,
    HARD_CAUSE,
    LEMON,
    TOOL,
    USER,
    Drain,
    DrainLimits,
    allowed,
    cause_of,
    may_stand,
    node_limit,
    standing_limit,
    stays,
)
from robust_slurm.drain_reason import parse_reason

LIMITS = DrainLimits(max_nodes=3, max_percent=10.0, window=100.0, max_per_job=2)
NOW = 1000.0


@pytest.mark.parametrize(
    ("percent", "fleet", "most"),
    [
        (10.0, 0, 3),  # not known: the absolute limit alone
        (10.0, 4, 1),  # a small cluster may lose one
        (10.0, 20, 2),
        (10.0, 1000, 3),
        (100.0, 2, 2),
        (0.0, 1000, 0),  # none at all
        (0.0, 0, 0),
    ],
)
def test_node_limit(percent: float, fleet: int, most: int) -> None:
    assert node_limit(LIMITS._replace(max_percent=percent), fleet) == most


@pytest.mark.parametrize(
    ("drains", "job", "why"),
    [
        ([], 7, ""),
        ([(NOW - 1, "a", 1), (NOW - 2, "b", 2)], 7, ""),
        ([(NOW - 1, "a", 1), (NOW - 2, "b", 2), (NOW - 3, "c", 3)], 7, "3 other nodes"),
        ([(NOW - 1, "a", 1), (NOW - 2, "b", 2), (NOW - 101, "c", 3)], 7, ""),  # out of the window
        ([(NOW - 1, "a", 1), (NOW - 2, "a", 2), (NOW - 3, "a", 3)], 7, ""),  # one node thrice
        ([(NOW - 1, "x", 1), (NOW - 2, "a", 2), (NOW - 3, "b", 3)], 7, ""),  # x is the node itself
        ([(NOW - 1, "a", 7), (NOW - 2, "b", 7)], 7, "for job 7"),
        ([(NOW - 1, "a", 7), (NOW - 2, "a", 7)], 7, ""),
        ([(NOW - 1, "a", 0), (NOW - 2, "b", 0)], 0, ""),  # outside jobs there is none to blame
        ([(NOW + 50, "a", 1), (NOW + 5, "b", 2), (NOW, "c", 3)], 7, "3 other nodes"),  # clocks
        ([(NOW + 3600, "a", 1), (NOW + 3660, "b", 2), (NOW + 80_000, "c", 3)], 7, "3 other nodes"),
        ([(NOW + 9e9, "a", 1), (NOW + 9e9, "b", 2), (NOW + 9e9, "c", 3)], 7, ""),  # clock gone mad
    ],
)
def test_allowed(drains: list[tuple[float, str, int]], job: int, why: str) -> None:
    decision = allowed([Drain(*d) for d in drains], NOW, LIMITS, 1000, Drain(NOW, "x", job))
    assert decision.allowed == (not why)
    assert why in decision.why


def test_the_share_of_a_small_fleet_is_named() -> None:
    decision = allowed([Drain(NOW, "a", 1)], NOW, LIMITS, 10, Drain(NOW, "x", 2))
    assert not decision.allowed and "the limit is 1 (10 % of 10)" in decision.why


CAUSES = (USER, TOOL, HARD_CAUSE, "mounts", "xid-119", "")


@pytest.mark.parametrize("own", CAUSES)
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_counted_by_itself(cause: str, own: str) -> None:
    full = [Drain(NOW, name, number, cause) for number, name in enumerate("abc")]
    decision = allowed(full, NOW, LIMITS, 1000, Drain(NOW, "x", 7, own))
    same = cause == own and own != HARD_CAUSE  # which has a higher limit
    assert decision.allowed == (not same), decision
    if same and own:
        words = {USER: "for what users left"}.get(own, f"for {own}")
        assert f"3 other nodes were drained automatically {words} in 100 s" in decision.why


@pytest.mark.parametrize(
    ("limits", "fleet", "soft", "hard"),
    [
        (DrainLimits(5, 10.0, 3600.0, 2), 100, 5, 20),
        (DrainLimits(5, 10.0, 3600.0, 2), 10_000, 5, 20),
        (DrainLimits(5, 10.0, 3600.0, 2), 30, 3, 6),
        (DrainLimits(5, 10.0, 3600.0, 2), 4, 1, 1),
        (DrainLimits(50, 100.0, 3600.0, 2), 40, 40, 40),  # never lower than the others
        (DrainLimits(0, 10.0, 3600.0, 2), 100, 0, 0),  # none at all
        (DrainLimits(5, 0.0, 3600.0, 2), 100, 0, 0),
    ],
)
def test_hard_evidence_has_a_limit_of_its_own(
    limits: DrainLimits, fleet: int, soft: int, hard: int
) -> None:
    assert node_limit(limits, fleet) == soft
    assert node_limit(limits, fleet, HARD_CAUSE) == hard


def test_lemons_have_a_limit_of_their_own() -> None:
    limits = DrainLimits(5, 10.0, 3600.0, 2)
    assert [node_limit(limits, fleet, LEMON) for fleet in (10, 100, 200, 1000)] == [1, 2, 4, 5]
    assert node_limit(limits._replace(max_nodes=0), 100, LEMON) == 0


def test_hard_evidence_counts_against_no_job() -> None:
    made = [Drain(NOW, name, 7, HARD_CAUSE) for name in "abc"]
    assert allowed(made, NOW, LIMITS, 1000, Drain(NOW, "x", 7, HARD_CAUSE)).allowed


FAMILIES = {"mount-hung": "mounts", "mount-stale": "mounts", "xid-79": "xid", "xid-119": "xid"}


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("robust:node:mount-hung:/home:none:job7", "mounts"),
        ("robust:node:mount-stale:/x:none:job7", "mounts"),
        ("robust:node:xid-79:gpu0:reboot:job0", HARD_CAUSE),
        ("robust:node:gpu-gone:gpu0:reboot:job0", HARD_CAUSE),
        ("robust:node:gpu-missing:gpu0:reboot:job0", HARD_CAUSE),
        ("robust:node:xid-119:gpu0:reset-gpu:job0", "xid-119"),
        ("robust:node:lemon:-:service:job0", "lemon"),
        ("robust:user:disk-full:/tmp:none:job0", USER),
        ("robust:tool:gate-crashed:-:none:job0", TOOL),
        ("robust:tool:xid-error:-:none:job0", TOOL),
        ("Prolog error", ""),
    ],
)
def test_the_cause_of_a_drain(reason: str, cause: str) -> None:
    assert cause_of(parse_reason(reason), FAMILIES) == cause


def test_hard_evidence_is_of_the_node_and_known() -> None:
    classes = {c.check: c.cls for check in ALL for c in check.conditions}
    assert {check: classes.get(check) for check in HARD} == dict.fromkeys(HARD, "node")


@pytest.mark.parametrize(
    ("fleet", "cause", "most"),
    [
        (100, "mounts", 20),
        (100, USER, 20),
        (100, HARD_CAUSE, 30),
        (10, "mounts", 2),
        (4, "mounts", 2),
        (2, "mounts", 1),
        (4, HARD_CAUSE, 3),
        (200, LEMON, 4),
        (100, LEMON, 2),
        (10, LEMON, 1),
    ],
)
def test_how_many_may_stand(fleet: int, cause: str, most: int) -> None:
    limits = DrainLimits(5, 10.0, 3600.0, 2)
    assert standing_limit(limits, fleet, cause) == most
    there = [Drain(0.0, f"n{number}", 0, cause) for number in range(most)]
    own = Drain(NOW, "x", 0, cause)
    assert may_stand(there[1:], limits, fleet, own).allowed
    refused = may_stand(there, limits, fleet, own)
    assert not refused.allowed and f"the limit is {most} of {fleet}" in refused.why
    assert may_stand([*there[1:], own], limits, fleet, own).allowed, "it stands there already"
    assert may_stand(there, limits, 0, own).allowed, "of a fleet that nobody can count"


def test_different_causes_never_take_the_whole_of_a_small_fleet() -> None:
    limits = DrainLimits(5, 10.0, 3600.0, 2)
    there = [Drain(0.0, f"n{i}", 0, cause) for i, cause in enumerate((USER, TOOL, HARD_CAUSE))]
    refused = may_stand(there, limits, 4, Drain(0.0, "n3", 0, USER))
    assert refused.why == (
        "3 other nodes stand drained automatically for all causes together, the limit is 3 of 4"
    )
    assert may_stand(there, limits, 8, Drain(0.0, "n3", 0, USER)).allowed


@given(
    st.integers(1, 60),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 59), st.sampled_from(CAUSES)), max_size=300
    ),
)
def test_over_any_time_a_part_of_the_fleet_stays(
    fleet: int, asked: list[tuple[int, int, str]]
) -> None:
    """No node is ever undrained, and a drain is asked for every 20 to 60 minutes."""
    limits = DrainLimits(5, 10.0, 3600.0, 2)
    made: list[Drain] = []
    now = 0.0
    for pause, number, cause in asked:
        now += pause * 1200.0
        own = Drain(now, f"n{number % fleet}", 0, cause)
        if any(drain.node == own.node for drain in made):
            continue
        if (
            allowed(made, now, limits, fleet, own).allowed
            and may_stand(made, limits, fleet, own).allowed
        ):
            made.append(own)
    for kind in (USER, HARD_CAUSE):
        out = [drain for drain in made if drain.cause == kind]
        assert len(out) <= standing_limit(limits, fleet, kind)
    soft = [drain for drain in made if drain.cause not in (USER, HARD_CAUSE)]
    assert len(soft) <= standing_limit(limits, fleet, "mounts")
    assert len(made) <= max(3, 0.7 * fleet)


_limits = st.builds(
    DrainLimits,
    max_nodes=st.integers(0, 4),
    max_percent=st.floats(0, 100),
    window=st.floats(1, 200),
    max_per_job=st.integers(0, 3),
    hard_nodes=st.integers(0, 8),
    hard_percent=st.floats(0, 100),
    standing_percent=st.floats(0, 100),
    hard_standing_percent=st.floats(0, 100),
)
_gates = st.lists(
    st.tuples(st.floats(0, 500), st.sampled_from("abcdefgh"), st.integers(0, 3)), max_size=30
)


@given(_limits, st.integers(0, 40), _gates)
def test_reservations_never_pass_a_limit(
    limits: DrainLimits, fleet: int, gates: list[tuple[float, str, int]]
) -> None:
    """Gates ask one after another (the lock), with clocks that differ as they like."""
    made: list[Drain] = []
    for at, node, job in gates:
        own = Drain(at, node, job)
        if not allowed(made, at, limits, fleet, own).allowed:
            continue
        made.append(own)
        recent = [d for d in made if abs(d.time - at) < limits.window]
        assert len({d.node for d in recent}) <= max(node_limit(limits, fleet), 1)
        assert node_limit(limits, fleet) > 0
        if job:
            assert len({d.node for d in recent if d.job == job}) <= limits.max_per_job


class Gate:
    """A gate without a shared ledger, as a machine of four steps: look, drain, look again, back."""

    def __init__(self, node: str, job: int) -> None:
        self.node, self.job = node, job
        self.step = "look"
        self.own = Drain(0.0, node, job)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 3)).map(
        lambda most: DrainLimits(most[0], 100.0, 1e6, most[1])
    ),
    st.sampled_from([0, 0, 2, 40]),
    st.lists(st.integers(0, 1), min_size=2, max_size=4),
    st.lists(st.integers(-1, 5), max_size=40),
)
def test_drains_without_a_ledger_end_within_the_limits(
    limits: DrainLimits, fleet: int, jobs: list[int], schedule: list[int]
) -> None:
    """Any interleaving; time (-1 in the schedule) is told in whole seconds, as Slurm does.

    A gate looks again only when the second of its drain is over: then all that tie with it show.
    """
    gates = [Gate("abcdefgh"[i], job) for i, job in enumerate(jobs)]
    standing: dict[str, Drain] = {}
    clock = 1000.0
    # Whatever the schedule left undone is done at the end, one gate after the other.
    each = range(len(gates))
    rest = [-1, *each, -1, *each, -1, *each]
    for turn in [*schedule, *rest]:
        if turn < 0:
            clock += 1
            continue
        gate = gates[turn % len(gates)]
        seen = list(standing.values())
        if gate.step == "look":
            asked = Drain(clock, gate.node, gate.job)
            decision = allowed(seen, clock, limits, fleet, asked)
            gate.step = "drain" if decision.allowed else "end"
        elif gate.step == "drain":
            gate.own = standing[gate.node] = Drain(clock, gate.node, gate.job)
            gate.step = "again"
        elif gate.step == "again" and clock > gate.own.time:
            if not stays(seen, gate.own, clock, limits, fleet).allowed:
                del standing[gate.node]
            gate.step = "end"
    assert all(gate.step == "end" for gate in gates)
    assert len(standing) <= node_limit(limits, fleet)
    assert len([d for d in standing.values() if d.job]) <= limits.max_per_job
    if any(allowed([], clock, limits, fleet, gate.own).allowed for gate in gates):
        assert standing  # the first one always stays
