"""Failures since the last progress, and the nodes that they count against (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from srun_wrapper.decide.diagnosis import Diagnosis, shared

TOGETHER = 3  # hangs in a row that name several nodes together before they leave


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
        if innocent(diagnosis):
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
        nobody = frozenset[str]()
        diagnosis = replace(
            diagnosis, cause="shared", suspects=(), evidence=evidence, unreported=nobody
        )
    if diagnosis.cause != "shared" or diagnosis.unreported:
        return diagnosis, ()
    for node in nodes.union(evicted):
        budget.nodes.pop(node, None)
    return diagnosis, tuple(sorted(evicted))


def unproven_nan(diagnosis: Diagnosis) -> bool:
    """A NaN for which no machine is known to be the cause: nobody is blamed for it."""
    return diagnosis.symptom == "nan" and diagnosis.cause != "node"


def innocent(diagnosis: Diagnosis) -> bool:
    """True if the failure says nothing about any node.

    Of ranks that died of another's death the first to notice is no more suspect than any other.
    """
    echo = diagnosis.symptom == "crash" and diagnosis.cause == "transient"
    echo = echo or (diagnosis.tests == "only" and diagnosis.cause == "unknown")
    return echo or diagnosis.cause in ("shared", "user") or unproven_nan(diagnosis)


def suspect_nodes(diagnosis: Diagnosis, failures_by_node: Mapping[str, int]) -> tuple[str, ...]:
    """Nodes to evict: blamed by the evidence, or failing twice without progress.

    One that has just passed tests may fail once more: its program may be the cause; so may one
    whose ranks died without a known cause, as they move to another node first. Of several suspects
    of a hang all may be healthy but one: they leave the third time, if they can be spared.
    """
    if diagnosis.cause == "node":
        return diagnosis.suspects
    blamed = diagnosis.suspects or (diagnosis.root.node,)
    if innocent(diagnosis):
        return ()
    if len(blamed) > 1:
        if diagnosis.symptom != "hang":
            return ()
        often = (n for n in blamed if failures_by_node.get(n, 0) >= TOGETHER)
        return tuple(n for n in often if n not in diagnosis.cleared)
    return tuple(
        node
        for node in blamed
        if node
        and failures_by_node.get(node, 0) >= 2 + (node in diagnosis.cleared or diagnosis.exchange)
    )
