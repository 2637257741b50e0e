"""The automatic drains that Slurm shows, as the circuit breaker counts them.

They are counted where there is no ledger or it does not answer. No lock orders the gates then: each
drains, counts again, and undrains unless the limits hold with its own drain. So the limits hold
also if gates see each other's drains late; then fewer nodes are drained than the limits allow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from health.checks import ALL
from health.gate.breaker import (
    USER,
    Decision,
    Drain,
    DrainLimits,
    allowed,
    allowed_for_user,
    cause_of,
    may_stand,
    stays,
)
from robust_slurm.drain_reason import parse_reason

if TYPE_CHECKING:
    from robust_slurm.slurm import Slurm, SlurmNode

TICK_S = 1.0  # Slurm tells the time of a drain in whole seconds
SPREAD_S = 2.0  # in which gates that fail at once look one after another
AGAIN_S = 0.25  # until Slurm is asked once more to take a drain back
_LOOKS = 4  # until other gates have taken back what is too many
_REQUESTS = 6  # at most, from the order until a drain is taken back


def cause(reason: str) -> str:
    """The cause under which the breaker counts a drain for this reason."""
    return cause_of(parse_reason(reason), _families())


@cache
def _families() -> Mapping[str, str]:
    """The family of each finding, those of a check that hung or broke among them."""
    found = {f"{check.name}-{end}": check.name for check in ALL for end in ("hung", "error")}
    return found | {condition.check: check.name for check in ALL for condition in check.conditions}


def standing_drains(nodes: Mapping[str, SlurmNode]) -> list[Drain]:
    """The automatic drains that Slurm shows. Pure."""
    found = []
    for node in nodes.values():
        reason = parse_reason(node.reason or "")
        if reason is not None and "DRAIN" in node.state and node.reason_time is not None:
            told = cause(node.reason or "")
            found.append(Drain(node.reason_time, node.name, reason.job, told))
    return found


class SlurmsRecords:
    """The count of ``own``, one node's drain. ``rest``: seconds until its gate must be over."""

    def __init__(
        self,
        own: Drain,
        limits: DrainLimits,
        door: Callable[[], Slurm],
        pause: Callable[[float], None],
        rest: Callable[[], float],
    ) -> None:
        self.own = own
        self._limits = limits
        self._door = door
        self._pause = pause
        self._rest = rest
        self._look_s = 0.0  # what a look at all nodes takes here and now

    def limit(self, pending: Sequence[Drain], same: Sequence[Drain] = ()) -> str:
        """The limit that the nodes drained now have reached; "": none, or Slurm does not answer.

        For a drain that the ledger has admitted. ``pending``: others that it has; ``same``: the
        same user's, which count as long as they stand.
        """
        from robust_slurm.slurm import SlurmError

        try:
            drains, fleet = self._look()
        except SlurmError:
            return ""  # the ledger's limits hold
        standing = {d.node for d in drains if d.cause == USER}
        decision = allowed_for_user(same, standing, self.own.time, self._limits, self.own)
        if not decision.allowed:
            return decision.why
        return self._count([*drains, *pending], fleet, self.own, self.own.time).why

    def forbid(self) -> str:
        """The reason against a drain counted by Slurm's records only; "" if none. SlurmError."""
        self._pause(random.uniform(0.0, min(SPREAD_S, self._rest() / 4)))
        drains, fleet = self._look()
        decision = self._count(drains, fleet, self.own, self.own.time)
        if decision.allowed and self._late():
            return (
                "no shared ledger, and no time to count by Slurm's records: one look at all nodes "
                f"takes {self._look_s:.1f} s"
            )
        return decision.why

    def recount(self, reason: str, *, reserved: bool = False) -> str:
        """Count all standing drains once more, with this one; return why it was undone, or "".

        ``reserved``: the ledger has counted it, so it gives way only to earlier drains. A drain
        without a reservation gives way to those with one but cannot tell them apart: it stays only
        if all standing drains are within the limits, while gates beyond the limits undo theirs.
        """
        from robust_slurm.slurm import SlurmError

        decision = Decision(False, "")
        for _ in range(_LOOKS):
            # Afterwards all drains made in the same second are visible: see breaker.stays.
            self._pause(TICK_S)
            try:
                drains, fleet = self._look()
            except SlurmError as error:
                if reserved:
                    return ""
                return self.take_back(reason, f"Slurm does not show what stands: {error}")
            mine = next((one for one in drains if one.node == self.own.node), None)
            if mine is None:
                return ""
            now = max(time.time(), mine.time)
            decision = stays(drains, mine, now, self._limits, fleet)
            if not decision.allowed or reserved:
                break
            decision = self._count(drains, fleet, mine, now)
            if decision.allowed or self._late():
                break
        return "" if decision.allowed else self.take_back(reason, decision.why)

    def take_back(self, reason: str, why: str) -> str:
        """Undrain the node, as often as there is time for; ``why``, or "" if it stays drained."""
        from robust_slurm.slurm import SlurmError

        while True:
            try:
                result = self._door().undrain(self.own.node, reason)
                return why if result.done or "DRAIN" not in result.before.state else ""
            except SlurmError:  # one that refuses at once is not to be asked all the time
                if self._rest() <= AGAIN_S:
                    return ""
                self._pause(AGAIN_S)

    # ---- inside

    def _look(self) -> tuple[list[Drain], int]:
        began = time.monotonic()
        nodes = self._door().nodes()
        self._look_s = time.monotonic() - began
        return standing_drains(nodes), len(nodes)

    def _late(self) -> bool:
        """True if a drain made now could not be taken back in time."""
        return self._rest() < TICK_S + _REQUESTS * self._look_s

    def _count(self, drains: Sequence[Drain], fleet: int, own: Drain, now: float) -> Decision:
        decision = allowed(drains, now, self._limits, fleet, own)
        return decision if not decision.allowed else may_stand(drains, self._limits, fleet, own)
