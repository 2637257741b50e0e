"""Which rung of the recovery ladder comes next (pure).

1 restart in place; 2 swap with a spare of the allocation; 3 swap with a companion from the
standby partition; 4 requeue. Stop when the error is the user's and repeats, or when the budget
is spent: recoveries in a row without progress. Only progress refills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from srun_wrapper.diagnose import Diagnosis

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
    """What has failed since the last progress."""

    failures: int = 0
    signatures: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)  # root failures by node

    def spend(self, diagnosis: Diagnosis) -> None:
        self.failures += 1
        self.signatures[diagnosis.signature] = self.signatures.get(diagnosis.signature, 0) + 1
        for node in diagnosis.suspects or (diagnosis.root.node,):
            if node and not _unproven_nan(diagnosis):
                self.nodes[node] = self.nodes.get(node, 0) + 1

    def refill(self) -> None:
        self.failures = 0
        self.signatures.clear()
        self.nodes.clear()


@dataclass(frozen=True, slots=True)
class Means:
    """What a recovery can use now."""

    spares: int
    companions: int  # how many nodes may still be asked from the standby partition
    requeue: bool
    max_restarts: int


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


def _over(diagnosis: Diagnosis, budget: Budget, means: Means) -> Plan | None:
    """The end of the job, where nothing more is tried."""
    repeats = budget.signatures.get(diagnosis.signature, 0)
    if not diagnosis.root.launched and diagnosis.cause != "node":
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


def suspect_nodes(diagnosis: Diagnosis, failures_by_node: Mapping[str, int]) -> tuple[str, ...]:
    """Nodes to evict: blamed by the evidence, or failing twice without progress.

    One that has just passed tests may fail once more: its program may be the cause.
    """
    if diagnosis.cause == "node":
        return diagnosis.suspects
    blamed = diagnosis.suspects or (diagnosis.root.node,)
    if diagnosis.cause == "user" or len(blamed) > 1 or _unproven_nan(diagnosis):
        return ()
    return tuple(
        node
        for node in blamed
        if node and failures_by_node.get(node, 0) >= 2 + (node in diagnosis.cleared)
    )
