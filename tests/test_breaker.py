"""The circuit breaker: never more drains than the limits, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from health.breaker import Drain, Limits, allowed, node_limit, stays

LIMITS = Limits(max_nodes=3, max_percent=10.0, window=100.0, max_per_job=2)
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


def test_what_users_leave_is_counted_apart() -> None:
    full = [Drain(NOW, name, number, True) for number, name in enumerate("abc")]
    mine = Drain(NOW, "x", 7, True)
    refused = allowed(full, NOW, LIMITS, 1000, mine)
    assert (
        not refused.allowed and "3 other nodes were drained automatically for what" in refused.why
    )
    assert allowed(full, NOW, LIMITS, 1000, mine._replace(user=False)).allowed
    broken = [drain._replace(user=False) for drain in full]
    assert not allowed(broken, NOW, LIMITS, 1000, mine._replace(user=False)).allowed
    assert allowed(broken, NOW, LIMITS, 1000, mine).allowed


_limits = st.builds(
    Limits,
    max_nodes=st.integers(0, 4),
    max_percent=st.floats(0, 100),
    window=st.floats(1, 200),
    max_per_job=st.integers(0, 3),
)
_gates = st.lists(
    st.tuples(st.floats(0, 500), st.sampled_from("abcdefgh"), st.integers(0, 3)), max_size=30
)


@given(_limits, st.integers(0, 40), _gates)
def test_reservations_never_pass_a_limit(
    limits: Limits, fleet: int, gates: list[tuple[float, str, int]]
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


@settings(max_examples=500)
@given(
    st.builds(Limits, st.integers(0, 3), st.just(100.0), st.just(1e6), st.integers(1, 3)),
    st.sampled_from([0, 0, 2, 40]),
    st.lists(st.integers(0, 1), min_size=2, max_size=4),
    st.lists(st.integers(-1, 5), max_size=40),
)
def test_drains_without_a_ledger_end_within_the_limits(
    limits: Limits, fleet: int, jobs: list[int], schedule: list[int]
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
