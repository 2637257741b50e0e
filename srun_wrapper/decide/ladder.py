"""Choose the next rung of the recovery ladder (pure).

1 restart in place; 2 swap with a spare of the allocation; 3 swap with a companion from the
standby partition; 4 requeue. Stop when the error is the user's and repeats, or when the budget
is spent: recoveries in a row without progress. Only progress refills it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from srun_wrapper.decide.diagnosis import LIMIT, Diagnosis, shared

Action = Literal["restart", "swap_spare", "swap_companion", "requeue", "stop"]
GAVE_UP = 120
NOTHING_LEFT = 121
REQUEUED = 122
NAN_AGAIN = (
    "the loss is not finite again at the same spot and no machine is proven to be at fault: the "
    "program's own (learning rate, data; if it gets over that by itself, --robust-nan=ignore)"
)


@dataclass(slots=True)
class Budget:
    """Failures since the last progress, by signature and by node."""

    failures: int = 0
    signatures: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)  # root failures by node
    seen: dict[str, set[str]] = field(default_factory=dict)  # nodes by the signature they showed
    # Suspects that left, and what came in their places, by the signature of the error.
    evicted: dict[str, dict[str, str]] = field(default_factory=dict)
    spent: tuple[str, tuple[str, ...]] | None = None  # the last failure's signature, its nodes

    def spend(self, diagnosis: Diagnosis) -> None:
        self.failures += 1
        self.seen.setdefault(diagnosis.signature, set()).update(diagnosis.seen)
        self.signatures[diagnosis.signature] = self.signatures.get(diagnosis.signature, 0) + 1
        blamed = tuple(node for node in diagnosis.suspects or (diagnosis.root.node,) if node)
        if _innocent(diagnosis):
            blamed = ()
        for node in blamed:
            self.nodes[node] = self.nodes.get(node, 0) + 1
        self.spent = diagnosis.signature, blamed

    def refund(self) -> None:
        """Undo the last ``spend``: nothing was tried. Which nodes showed the error stays known."""
        if self.spent is None:
            return
        signature, blamed = self.spent
        self.spent = None
        self.failures -= 1
        self.signatures[signature] -= 1
        for node in blamed:
            if node in self.nodes:  # it may have been acquitted
                self.nodes[node] -= 1

    def refill(self) -> None:
        self.failures, self.spent = 0, None
        self.signatures.clear()
        self.nodes.clear()
        self.seen.clear()
        self.evicted.clear()

    def evict(
        self, diagnosis: Diagnosis, swaps: Iterable[tuple[str, str]], sure: Collection[str]
    ) -> None:
        """Note which nodes left on suspicion; ``sure``: those that are lost."""
        for old, new in swaps:
            if old not in sure and old not in diagnosis.proven:
                self.evicted.setdefault(diagnosis.signature, {})[old] = new


@dataclass(frozen=True, slots=True)
class Means:
    """Means that a recovery can use now."""

    spares: int
    companions: int  # how many nodes may still be asked from the standby partition
    requeue: bool
    max_restarts: int
    never: str = ""  # why the ranks cannot be started again at all


@dataclass(frozen=True, slots=True)
class Plan:
    action: Action
    replace: tuple[str, ...]  # nodes that leave the job
    why: str
    code: int = 0  # exit code for stop; 0: the failing rank's own


def plan(diagnosis: Diagnosis, vacant: tuple[str, ...], budget: Budget, means: Means) -> Plan:
    """Choose the next action.

    ``vacant``: nodes that are gone and must be replaced whatever else is true; so must those that
    are proven bad. ``budget`` already includes this failure.
    """
    must = tuple(dict.fromkeys([*vacant, *diagnosis.proven]))
    if means.never:
        return Plan("stop", must, means.never)
    if not diagnosis.proven and (end := _over(diagnosis, budget, means)):
        return end
    leave = tuple(dict.fromkeys([*must, *suspect_nodes(diagnosis, budget.nodes)]))
    if not leave:
        return Plan("restart", (), "no node is to blame: restart in place")
    for leaving in (leave, must):  # a suspect may stay, a lost node cannot
        if leaving and len(leaving) <= means.spares:
            return Plan("swap_spare", leaving, "a spare of the allocation takes over")
        if leaving and len(leaving) <= means.spares + means.companions:
            return Plan("swap_companion", leaving, "a node of the standby partition takes over")
    if not must:
        return Plan("restart", (), "no node left to replace the suspect: restart in place")
    if means.requeue:
        what = "lost" if vacant else "bad"
        return Plan("requeue", leave, f"no node left to replace the {what} one")
    what = "lost" if vacant else f"bad ({','.join(must)})"
    why = f"a node is {what}, no spare or standby node is left, and requeueing is not possible"
    return Plan("stop", leave, why, NOTHING_LEFT)


def acquit(diagnosis: Diagnosis, budget: Budget) -> tuple[Diagnosis, tuple[str, ...]]:
    """Acquit the nodes of an error that others have shown as well since the last progress.

    Then it is the program, its data or a shared service. Two nodes in turn acquit each other,
    but where the error itself names the machine only a replacement with the same error acquits
    the node before it. Of a hang nobody knows for sure where it began: the next one acquits the
    nodes that were evicted for it. Returns the diagnosis, and the nodes whose reports are wrong.
    """
    evicted = budget.evicted.get(diagnosis.signature, {})
    nodes = budget.seen.get(diagnosis.signature, set())
    if diagnosis.symptom == "hang":
        again, why = bool(evicted), f"the same hang without {', '.join(sorted(evicted))}"
    elif diagnosis.cause == "node":
        again, why = not nodes.isdisjoint(evicted.values()), shared(sorted(nodes))
    else:
        again, why = diagnosis.cause == "unknown" and len(nodes) > 1, shared(sorted(nodes))
    if again:
        evidence = (*diagnosis.evidence, why)
        diagnosis = replace(diagnosis, cause="shared", suspects=(), evidence=evidence)
    if diagnosis.cause != "shared" or diagnosis.unreported:
        return diagnosis, ()
    for node in nodes.union(evicted):
        budget.nodes.pop(node, None)
    return diagnosis, tuple(sorted(evicted))


def _over(diagnosis: Diagnosis, budget: Budget, means: Means) -> Plan | None:
    """The end of the job, where nothing more is tried."""
    repeats = budget.signatures.get(diagnosis.signature, 0)
    never = not diagnosis.root.launched and not LIMIT.search(diagnosis.root.tail)
    if never and diagnosis.cause != "node":
        return Plan("stop", (), "the command cannot be run")
    if diagnosis.cause == "user" and repeats >= 2:
        return Plan("stop", (), "the same error twice without progress: it is the program's own")
    if repeats >= 2 and _unproven_nan(diagnosis):
        return Plan("stop", (), NAN_AGAIN, GAVE_UP)
    if budget.failures > means.max_restarts:
        code = 0 if diagnosis.symptom == "crash" else GAVE_UP
        why = f"{means.max_restarts} recoveries in a row brought no progress"
        return Plan("stop", (), why, code)
    return None


def _unproven_nan(diagnosis: Diagnosis) -> bool:
    """A NaN for which no machine is known to be the cause: nobody is blamed for it."""
    return diagnosis.symptom == "nan" and diagnosis.cause != "node"


def _innocent(diagnosis: Diagnosis) -> bool:
    """True if the failure says nothing about any node.

    Of ranks that died of another's death the first to notice is no more suspect than any other.
    """
    echo = diagnosis.symptom == "crash" and diagnosis.cause == "transient"
    return echo or diagnosis.cause in ("shared", "user") or _unproven_nan(diagnosis)


def suspect_nodes(diagnosis: Diagnosis, failures_by_node: Mapping[str, int]) -> tuple[str, ...]:
    """Nodes to evict: blamed by the evidence, or failing twice without progress.

    One that has just passed tests may fail once more: its program may be the cause.
    """
    if diagnosis.cause == "node":
        return diagnosis.suspects
    blamed = diagnosis.suspects or (diagnosis.root.node,)
    if _innocent(diagnosis) or len(blamed) > 1:
        return ()
    return tuple(
        node
        for node in blamed
        if node and failures_by_node.get(node, 0) >= 2 + (node in diagnosis.cleared)
    )
