"""The circuit breaker: a limit on the number of nodes drained automatically. Pure.

A fault of the checks themselves, a shared service that fails, or one bad job walking from node to
node, would otherwise take the whole cluster out of service. Each cause is counted by itself, so
that a dead file system does not use up what broken GPUs need. Hard evidence has higher limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from robust_slurm.drain_reason import Reason

USER, TOOL, HARD_CAUSE = "user", "tool", "hard"
LEMON = "lemon"  # drained on the word of users, with every check passing
# Causes that lie outside the node as a rule: file servers, and whatever a site's commands ask.
SHARED = frozenset({"mounts", "site"})
# Findings that name a broken part of this very node: no shared service and no user explains them.
HARD = frozenset(
    {
        "aer-fatal", "ecc-sram-threshold", "ecc-uncorrected", "gpu-fell-off-bus", "gpu-gone",
        "gpu-lost", "gpu-missing", "gpu-power-cable", "mce-uncorrected", "memory-uncorrected",
        "nvme-dead", "pcie-gone", "remap-failed", "xid-48", "xid-64", "xid-79", "xid-95", "xid-171",
        "xid-172",
    }
)  # fmt: skip


class DrainLimits(NamedTuple):
    """``window`` is in seconds, percentages are of the fleet; ``max_nodes`` or ``max_percent`` 0
    forbids all drains. Limits for hard evidence are never lower than the others."""

    max_nodes: int
    max_percent: float
    window: float
    max_per_job: int
    hard_nodes: int = 20
    hard_percent: float = 20.0
    standing_percent: float = 20.0
    hard_standing_percent: float = 30.0
    lemon_percent: float = 2.0


class Drain(NamedTuple):
    """One automatic drain, or its reservation. ``time``: wall clock; ``job`` 0: none to blame.

    ``cause``: what it is counted with, see ``cause_of``. ``uid``: for class user, whose leftovers
    they are; -1: nobody knows whose.
    """

    time: float
    node: str
    job: int
    cause: str = ""
    uid: int = -1


AHEAD_S = 86_400.0
"""Seconds ahead of the clock at which a drain in Slurm's list may be dated to count."""
FLOOR = {False: 2, True: 3}
"""Nodes that may stand drained in a fleet of any size: for a cause, and for hard evidence."""


class Decision(NamedTuple):
    allowed: bool
    why: str  # which limit, in one line; empty when allowed


def cause_of(reason: Reason | None, families: Mapping[str, str]) -> str:
    """The name under which a drain is counted: findings that one event can cause share one.

    Users' leftovers, failures of our own tools, and hard evidence are one cause each.
    ``families``: the family of each finding. Those of one family look at the same thing (mounts,
    the network, the driver); only each Xid is a cause of its own.
    """
    if reason is None:
        return ""
    if reason.cls != "node":
        return USER if reason.cls == "user" else TOOL
    if reason.check in HARD:
        return HARD_CAUSE
    family = families.get(reason.check, reason.check)
    return reason.check if family == "xid" else family


def node_limit(limits: DrainLimits, fleet_size: int, cause: str = "") -> int:
    """The limit on nodes drained for one cause within the window; in any fleet at least one.

    ``fleet_size`` 0: not known, so that only the absolute limit counts.
    """
    if limits.max_percent <= 0:
        return 0
    most = _share(limits.max_nodes, limits.max_percent, fleet_size)
    if cause == LEMON:
        return min(most, _share(limits.max_nodes, limits.lemon_percent, fleet_size))
    if cause == HARD_CAUSE and most > 0:
        return max(most, _share(limits.hard_nodes, limits.hard_percent, fleet_size))
    return most


def _share(most: int, percent: float, fleet_size: int) -> int:
    return min(most, max(1, int(fleet_size * percent / 100))) if fleet_size > 0 else most


def standing_limit(limits: DrainLimits, fleet_size: int, cause: str = "") -> int:
    """The limit on nodes that stand drained at once, however long ago; never below the window's.

    In a small fleet a node that waits for service must not keep the next bad one in it: FLOOR
    nodes may stand, but never the whole fleet.
    """
    if cause == LEMON:
        most = limits.max_percent > 0 and limits.max_nodes > 0
        return max(int(most), int(fleet_size * min(limits.lemon_percent, 100.0) / 100))
    percent = limits.hard_standing_percent if cause == HARD_CAUSE else limits.standing_percent
    window = node_limit(limits, fleet_size, cause)
    floor = min(FLOOR[cause == HARD_CAUSE], fleet_size - 1) if window > 0 else 0
    return max(window, floor, int(fleet_size * min(percent, 100.0) / 100))


def allowed(
    drains: Iterable[Drain], now: float, limits: DrainLimits, fleet_size: int, own: Drain
) -> Decision:
    """Decide whether one more drain stays within the limits of the window, at ``now``.

    Nodes are counted, not drains: the same node again is no wider blast radius. A record from the
    future counts, as a clock may have been set back; one from more than a day ahead is a clock gone
    wrong, and would bind the breaker for ever. The
    ledger's records are dated by its order before (``reserve.parse``): this is for Slurm's list.
    """
    job = own.job if own.cause != HARD_CAUSE else 0  # no job breaks a part of a node
    others = [d for d in drains if d.node != own.node and d.cause == own.cause]
    recent = [d for d in others if now - limits.window < d.time < now + AHEAD_S]
    nodes = {d.node for d in recent}
    most = node_limit(limits, fleet_size, own.cause)
    if len(nodes) >= most:
        whole = limits.hard_nodes if own.cause == HARD_CAUSE else limits.max_nodes
        shares = {HARD_CAUSE: limits.hard_percent, LEMON: limits.lemon_percent}
        percent = shares.get(own.cause, limits.max_percent)
        share = f" ({percent:g} % of {fleet_size})" if most < whole else ""
        return Decision(
            False,
            f"{_others(nodes)} drained automatically{_of(own.cause)} in "
            f"{limits.window:g} s, the limit is {most}{share}",
        )
    of_job = {d.node for d in recent if job and d.job == job}
    if job and len(of_job) >= limits.max_per_job:
        return Decision(
            False,
            f"{_others(of_job)} drained for job {job} in {limits.window:g} s, the "
            f"limit is {limits.max_per_job}",
        )
    return Decision(True, "")


def allowed_for_user(
    drains: Iterable[Drain],
    standing: Collection[str],
    now: float,
    limits: DrainLimits,
    own: Drain,
) -> Decision:
    """Decide whether one more node may be drained for what this user left.

    Nodes drained within the window count, and those that stand drained since earlier. Without a
    user only the other limits hold: two such nodes would else bind all others of the fleet.
    """
    if own.cause != USER or own.uid < 0:
        return Decision(True, "")
    nodes = {
        d.node
        for d in drains
        if (d.cause, d.uid) == (USER, own.uid)
        and d.node != own.node
        and (d.node in standing or abs(d.time - now) < limits.window)
    }
    if len(nodes) < limits.max_per_job:
        return Decision(True, "")
    what = f"uid {own.uid} left"
    return Decision(
        False, f"{_others(nodes)} drained for what {what}, the limit is {limits.max_per_job}"
    )


def may_stand(
    standing: Collection[Drain], limits: DrainLimits, fleet_size: int, own: Drain
) -> Decision:
    """Decide whether one more node may stand drained beside those that do now.

    The window alone would let all nodes be out after some hours. Users' leftovers, hard evidence
    and all the rest have a share of the fleet each.
    """
    if fleet_size <= 0:
        return Decision(True, "")
    kind = _kind(own.cause)
    nodes = {d.node for d in standing if d.node != own.node and _kind(d.cause) == kind}
    most = standing_limit(limits, fleet_size, own.cause)
    why = _of(kind)
    if len(nodes) < most:
        nodes = {d.node for d in standing if d.node != own.node}
        most, why = max(most, _whole_limit(limits, fleet_size)), " for all causes together"
        if len(nodes) < most:
            return Decision(True, "")
    return Decision(
        False,
        f"{_others(nodes, 'stands', 'stand')} drained automatically{why}, the limit is "
        f"{most} of {fleet_size}",
    )


def _whole_limit(limits: DrainLimits, fleet_size: int) -> int:
    """The limit for all causes together: their shares, and in a small fleet never the whole."""
    percent = min(2 * limits.standing_percent + limits.hard_standing_percent, 100.0)
    return max(min(FLOOR[True], fleet_size - 1), int(fleet_size * percent / 100))


def _others(nodes: Collection[str], one: str = "was", more: str = "were") -> str:
    return f"1 other node {one}" if len(nodes) == 1 else f"{len(nodes)} other nodes {more}"


def _kind(cause: str) -> str:
    return cause if cause in (USER, HARD_CAUSE, LEMON) else ""


def _of(cause: str) -> str:
    words = {USER: " for what users left", HARD_CAUSE: " on hard evidence", "": ""}
    words[LEMON] = " as lemons"
    return words.get(cause, f" for {cause}")


def stays(
    drains: Iterable[Drain], own: Drain, now: float, limits: DrainLimits, fleet_size: int
) -> Decision:
    """Decide whether a drain made without a reservation may stand, seen among all that do.

    Only drains that come before it, by (time, node), count against it. If every gate looks again
    once all drains of its own time are visible, no more than the limit are left.
    """
    key = (own.time, own.node)
    earlier = [d for d in drains if (d.time, d.node) < key]
    decision = allowed(earlier, now, limits, fleet_size, own)
    return decision if not decision.allowed else may_stand(earlier, limits, fleet_size, own)
