"""How many nodes may be drained automatically: the circuit breaker. Pure.

A fault of the checks themselves, or one bad job walking from node to node, would otherwise take
the whole cluster out of service.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Limits(NamedTuple):
    """``window`` is in seconds, ``max_percent`` of the fleet; a limit of 0 forbids all drains."""

    max_nodes: int
    max_percent: float
    window: float
    max_per_job: int


class Drain(NamedTuple):
    """One automatic drain, or its reservation. ``time``: wall clock; ``job`` 0: none to blame.

    ``user``: for what a user left there (class user). These are counted apart: whoever fills
    disks must not use up what broken nodes need.
    """

    time: float
    node: str
    job: int
    user: bool = False


class Decision(NamedTuple):
    allowed: bool
    why: str  # which limit, in one line; empty when allowed


def node_limit(limits: Limits, fleet_size: int) -> int:
    """How many nodes may be out at once; of any fleet at least one, if there is a percentage.

    ``fleet_size`` 0: not known, so that only the absolute limit counts.
    """
    if fleet_size <= 0 or limits.max_percent <= 0:
        return limits.max_nodes if limits.max_percent > 0 else 0
    return min(limits.max_nodes, max(1, int(fleet_size * limits.max_percent / 100)))


def allowed(
    drains: Iterable[Drain], now: float, limits: Limits, fleet_size: int, own: Drain
) -> Decision:
    """Whether one more drain stays within the limits, at ``now``.

    Nodes are counted, not drains: the same node again is no wider blast radius. A record from the
    near future counts (clocks differ); one from further off is a clock gone wrong, and would bind
    the breaker for ever.
    """
    job = own.job
    others = [d for d in drains if d.node != own.node and d.user == own.user]
    recent = [d for d in others if abs(d.time - now) < limits.window]
    nodes = {d.node for d in recent}
    most = node_limit(limits, fleet_size)
    if len(nodes) >= most:
        kind = " for what users left" if own.user else ""
        share = f" ({limits.max_percent:g} % of {fleet_size})" if most < limits.max_nodes else ""
        return Decision(
            False,
            f"{len(nodes)} other nodes were drained automatically{kind} in {limits.window:g} s, "
            f"the limit is {most}{share}",
        )
    of_job = {d.node for d in recent if job and d.job == job}
    if job and len(of_job) >= limits.max_per_job:
        return Decision(
            False,
            f"{len(of_job)} other nodes were drained for job {job} in {limits.window:g} s, the "
            f"limit is {limits.max_per_job}",
        )
    return Decision(True, "")


def stays(
    drains: Iterable[Drain], own: Drain, now: float, limits: Limits, fleet_size: int
) -> Decision:
    """Whether a drain that was made without a reservation may stand, seen among all that do.

    Only drains that come before it, by (time, node), count against it. If every gate looks again
    once all drains of its own time are visible, no more than the limit are left.
    """
    key = (own.time, own.node)
    earlier = [d for d in drains if (d.time, d.node) < key]
    return allowed(earlier, now, limits, fleet_size, own)
