"""Choose the next rung of the recovery ladder (pure).

1 restart in place; 2 swap with a spare of the allocation; 3 swap with a companion from the
standby partition; 4 requeue. Stop when the error is the user's and repeats, or when the budget
is spent: recoveries in a row without progress. Only progress refills it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    rung: str = ""  # id of the rung that was chosen


BACK = Plan("restart", (), "the lost nodes answer again", rung="back")


@dataclass(frozen=True)
class Situation:
    """The question that the rungs answer; ``vacant``, ``budget``: see ``plan``."""

    diagnosis: Diagnosis
    vacant: tuple[str, ...]
    budget: Budget
    means: Means

    @cached_property
    def must(self) -> tuple[str, ...]:
        """Nodes that leave in any case."""
        return tuple(dict.fromkeys([*self.vacant, *self.diagnosis.proven]))

    @cached_property
    def leave(self) -> tuple[str, ...]:
        """Nodes that leave if they can be replaced: suspects, too."""
        suspects = suspect_nodes(self.diagnosis, self.budget.nodes)
        return tuple(dict.fromkeys([*self.must, *suspects]))

    @property
    def repeats(self) -> int:
        """How often this error was seen since the last progress."""
        return self.budget.signatures.get(self.diagnosis.signature, 0)


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder. ``choose`` returns None where it does not apply.

    The texts are for people: the condition, and the action.
    """

    id: str
    condition: str
    action: str
    choose: Callable[[Situation], Plan | None]


def plan(diagnosis: Diagnosis, vacant: tuple[str, ...], budget: Budget, means: Means) -> Plan:
    """Choose the next action: the first rung of ``RUNGS`` that applies.

    ``vacant``: nodes that are gone and must be replaced whatever else is true; so must those that
    are proven bad. ``budget`` already includes this failure.
    """
    situation = Situation(diagnosis, vacant, budget, means)
    for rung in RUNGS:
        if (chosen := rung.choose(situation)) is not None:
            return replace(chosen, rung=rung.id)
    raise AssertionError("the last rung always applies")


def _no_start(now: Situation) -> Plan | None:
    return Plan("stop", now.must, now.means.never) if now.means.never else None


def _cannot_run(now: Situation) -> Plan | None:
    root = now.diagnosis.root
    never = not root.launched and not LIMIT.search(root.tail)
    if not never or now.diagnosis.cause == "node":
        return None
    return Plan("stop", (), "the command cannot be run")


def _same_error(now: Situation) -> Plan | None:
    if now.diagnosis.cause != "user" or now.repeats < 2:
        return None
    return Plan("stop", (), "the same error twice without progress: it is the program's own")


def _same_nan(now: Situation) -> Plan | None:
    if now.repeats < 2 or not _unproven_nan(now.diagnosis):
        return None
    return Plan("stop", (), NAN_AGAIN, GAVE_UP)


def _no_progress(now: Situation) -> Plan | None:
    most = now.means.max_restarts
    if now.diagnosis.proven or now.budget.failures <= most:
        return None
    code = 0 if now.diagnosis.symptom == "crash" else GAVE_UP
    return Plan("stop", (), f"{most} recoveries in a row brought no progress", code)


def _in_place(now: Situation) -> Plan | None:
    return None if now.leave else Plan("restart", (), "no node is to blame: restart in place")


def _spare(leaving: tuple[str, ...], means: Means) -> Plan | None:
    if not 0 < len(leaving) <= means.spares:
        return None
    return Plan("swap_spare", leaving, "a spare of the allocation takes over")


def _standby(leaving: tuple[str, ...], means: Means) -> Plan | None:
    if not 0 < len(leaving) <= means.spares + means.companions:
        return None
    return Plan("swap_companion", leaving, "a node of the standby partition takes over")


def _keep(now: Situation) -> Plan | None:
    if now.must:
        return None
    return Plan("restart", (), "no node left to replace the suspect: restart in place")


def _requeue(now: Situation) -> Plan | None:
    what = "lost" if now.vacant else "bad"
    why = f"no node left to replace the {what} one"
    return Plan("requeue", now.leave, why) if now.means.requeue else None


def _nothing_left(now: Situation) -> Plan:
    what = "lost" if now.vacant else f"bad ({','.join(now.must)})"
    why = f"a node is {what}, no spare or standby node is left, and requeueing is not possible"
    return Plan("stop", now.leave, why, NOTHING_LEFT)


RUNGS = (
    Rung("no-start", "the ranks cannot be started again at all", "stop", _no_start),
    Rung(
        "cannot-run",
        "the command cannot be started, and no node is to blame",
        "stop",
        _cannot_run,
    ),
    Rung(
        "same-error",
        "the program is to blame, the second time without progress",
        "stop with the rank's exit code",
        _same_error,
    ),
    Rung(
        "same-nan",
        "a loss is not finite, the second time without progress, and no machine is proven bad",
        f"stop with exit code {GAVE_UP}",
        _same_nan,
    ),
    Rung(
        "no-progress",
        "more than max_restarts recoveries in a row without progress, and no machine is proven bad",
        f"stop with the rank's exit code; {GAVE_UP} if no rank ended by itself",
        _no_progress,
    ),
    Rung("in-place", "no node is to leave", "restart in place", _in_place),
    Rung(
        "spare",
        "enough spares of the allocation for the nodes to leave",
        "swap them with spares",
        lambda now: _spare(now.leave, now.means),
    ),
    Rung(
        "standby",
        "enough spares and standby nodes for the nodes to leave",
        "swap them with standby nodes",
        lambda now: _standby(now.leave, now.means),
    ),
    Rung(
        "spare-for-lost",
        "enough spares for the lost and proven bad nodes",
        "swap these; suspects stay",
        lambda now: _spare(now.must, now.means),
    ),
    Rung(
        "standby-for-lost",
        "enough spares and standby nodes for the lost and proven bad nodes",
        "swap these with standby nodes; suspects stay",
        lambda now: _standby(now.must, now.means),
    ),
    Rung("keep", "no node is lost or proven bad", "restart in place; suspects stay", _keep),
    Rung(
        "requeue",
        "the job may be requeued",
        f"requeue without the nodes to leave, exit code {REQUEUED}",
        _requeue,
    ),
    Rung("nothing-left", "always", f"stop with exit code {NOTHING_LEFT}", _nothing_left),
)


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
