"""Failures since the last progress, and the nodes that they count against (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from srun_wrapper.decide.diagnosis import NEWCOMER, Diagnosis, shared

TOGETHER = 3  # hangs in a row that name several nodes together before they are evicted


class Trace(NamedTuple):
    """One failure: the node, the ranks, and the step of a NaN."""

    node: str
    ranks: frozenset[str]
    step: int | None
    at: float = 0.0


@dataclass(slots=True)
class Budget:
    """Failures since the last progress, by signature and by node."""

    failures: int = 0
    signatures: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)  # root failures by node
    seen: dict[str, set[str]] = field(default_factory=dict)  # nodes by the signature they showed
    # By the error's signature: each suspect that was evicted, and the node that replaced it.
    evicted: dict[str, dict[str, str]] = field(default_factory=dict)
    spent: tuple[str, tuple[str, ...]] | None = None  # the last failure's signature, its nodes
    traces: dict[str, list[Trace]] = field(default_factory=dict)  # by signature
    kept: frozenset[str] = frozenset()  # suspects that the last recovery let stay for their copies
    newcomers: dict[str, list[Trace]] = field(default_factory=dict)  # see ``of_newcomers``

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
        root = diagnosis.root
        trace = Trace(root.node, frozenset(diagnosis.ranks), root.step)
        self.traces.setdefault(diagnosis.signature, []).append(trace)

    def refund(self) -> None:
        """Undo the last ``spend``, as nothing was tried; ``seen`` stays as it is."""
        if self.spent is None:
            return
        signature, blamed = self.spent
        self.spent = None
        self.failures -= 1
        self.signatures[signature] -= 1
        self.traces[signature].pop()
        for node in blamed:
            if node in self.nodes:  # it may have been acquitted
                self.nodes[node] -= 1

    def refill(self) -> None:
        self.failures, self.spent = 0, None
        self.signatures.clear()
        self.nodes.clear()
        self.seen.clear()
        self.evicted.clear()
        self.traces.clear()
        self.newcomers.clear()
        self.kept = frozenset()

    def evict(
        self,
        diagnosis: Diagnosis,
        swaps: Iterable[tuple[str, str]],
        sure: Collection[str],
        kept: Iterable[str] = (),
    ) -> None:
        """Note the nodes that were evicted on suspicion.

        ``sure``: the lost ones; ``kept``: suspects that stayed only for their copies of snapshots.
        """
        self.kept = frozenset(kept)
        for old, new in swaps:
            if old not in sure and old not in diagnosis.proven:
                self.evicted.setdefault(diagnosis.signature, {})[old] = new


def of_newcomers(diagnosis: Diagnosis, budget: Budget) -> Diagnosis:
    """Judge an error that only nodes show that have just joined, by where it was before.

    The first node is to blame. At the second one the program may be: the ranks of the node move to
    another one, and the next time shows if the error stays on the node, or follows the ranks.
    """
    if diagnosis.rule != NEWCOMER:
        return diagnosis
    root, ranks, evidence = diagnosis.root, frozenset(diagnosis.ranks), diagnosis.evidence
    traces = budget.newcomers.setdefault(diagnosis.signature, [])
    before = [each for each in traces if each.at != root.at]  # a failure may be looked at twice
    traces[:] = [*before, *(Trace(node, ranks, None, root.at) for node in diagnosis.suspects)]
    here = [each for each in before if each.node == root.node]
    others = sorted({each.node for each in before} - {root.node})
    if any(not each.ranks & ranks for each in here):
        line = f"it stays on {root.node}, whose ranks had moved to another node"
        return replace(diagnosis, proven=(root.node,), evidence=(*evidence, line))
    if here:
        line = "the ranks could not move: nothing shows that the program is not to blame"
        return replace(diagnosis, cause="user", suspects=(), ranks=(), evidence=(*evidence, line))
    if others:
        line = f"as on {', '.join(others)} before"
        return replace(
            diagnosis, cause="unknown", suspects=(), exchange=True, evidence=(*evidence, line)
        )
    return diagnosis


def acquit(diagnosis: Diagnosis, budget: Budget) -> tuple[Diagnosis, tuple[str, ...]]:
    """Acquit the nodes of an error that others have shown as well since the last progress.

    Then the program, its data or a shared service is to blame. Two nodes that show the error in
    turn acquit each other; if the error names the machine, only the same error on its replacement
    acquits it. A hang acquits the nodes that were evicted for the one before it, as nobody knows
    for sure where a hang began; not if it names only suspects that had to stay, as it says nothing
    about the others then. Likewise a NaN that ranks of one node have alone.
    Returns the diagnosis, and the nodes whose reports are wrong.
    """
    evicted = budget.evicted.get(diagnosis.signature, {})
    nodes = budget.seen.get(diagnosis.signature, set())
    followed = follow(diagnosis, budget.traces.get(diagnosis.signature, []))
    judged = followed is not diagnosis
    if judged or diagnosis.rule == NEWCOMER:
        diagnosis, again, why = followed, False, ""
    elif diagnosis.symptom == "hang":
        rest = bool(diagnosis.suspects) and budget.kept.issuperset(diagnosis.suspects)
        again = bool(evicted) and not rest
        why = f"the same hang without {', '.join(sorted(evicted))}"
    elif diagnosis.symptom == "nan":  # a NaN on all ranks may come from an already spoilt state
        again = diagnosis.exchange and bool(evicted)
        why = f"a NaN of these ranks alone without {', '.join(sorted(evicted))}"
    elif diagnosis.cause == "node":
        again, why = not nodes.isdisjoint(evicted.values()), shared(sorted(nodes))
    else:
        again, why = diagnosis.cause == "unknown" and len(nodes) > 1, shared(sorted(nodes))
    if again:
        evidence = (*diagnosis.evidence, why)
        nobody = frozenset[str]()
        diagnosis = replace(
            diagnosis,
            cause="shared",
            suspects=(),
            evidence=evidence,
            unreported=nobody,
            exchange=False,
        )
    newcomers = {each.node for each in budget.newcomers.get(diagnosis.signature, ())}
    followed_ranks = judged or bool(newcomers)
    acquitted = diagnosis.cause == "shared" or (followed_ranks and diagnosis.cause == "user")
    if not acquitted or diagnosis.unreported:
        return diagnosis, ()
    wrong = newcomers.union(evicted)
    for node in nodes | wrong:
        budget.nodes.pop(node, None)
    return diagnosis, tuple(sorted(wrong))


def follow(diagnosis: Diagnosis, traces: Iterable[Trace]) -> Diagnosis:
    """Judge by where the same failure was before: it follows the ranks, or stays on the node.

    A NaN that all ranks had at once, twice at the same step, is the program's: a machine's error
    does not come back at the same step.
    """
    node, ranks, step = diagnosis.root.node, frozenset(diagnosis.ranks), diagnosis.root.step
    evidence = diagnosis.evidence
    if not diagnosis.exchange:
        known = diagnosis.symptom == "nan" and diagnosis.cause == "unknown"
        alike = [each for each in traces if not each.node and each.step == step is not None]
        if not known or len(alike) < 2 or node:
            return diagnosis
        again = f"again at step {step}, on no rank alone: the program or its data"
        return replace(diagnosis, cause="user", evidence=(*evidence, again))
    here = [each for each in traces if each.node == node and each.ranks]
    if came := next((each for each in traces if each.node != node and each.ranks & ranks), None):
        what = ", ".join(sorted(ranks & came.ranks))
        line = f"it follows {what} from {came.node} to {node}: the program, or the data of {what}"
        evidence = (*evidence, line)
        return replace(diagnosis, cause="user", suspects=(), exchange=False, evidence=evidence)
    if diagnosis.symptom != "nan":
        return diagnosis
    if any(not each.ranks.intersection(diagnosis.held) for each in here):
        line = f"it stays on {node}, whose ranks had moved to another node"
        return replace(diagnosis, cause="node", exchange=False, evidence=(*evidence, line))
    if len(here) > 2:  # no node could take its ranks: nothing shows whose fault it is
        return replace(diagnosis, suspects=(), exchange=False)
    return diagnosis


def unproven_nan(diagnosis: Diagnosis) -> bool:
    """True for a NaN that no machine is known to have caused: no node is blamed for it."""
    return diagnosis.symptom == "nan" and diagnosis.cause != "node"


def innocent(diagnosis: Diagnosis) -> bool:
    """True if the failure says nothing about any node.

    Of ranks that died because another one did, the first to notice is no more suspect than others.
    A hang speaks against a node only by evidence of the node's own; the watch names no other.
    """
    echo = diagnosis.symptom == "crash" and diagnosis.cause == "transient"
    echo = echo or (diagnosis.tests == "only" and diagnosis.cause == "unknown")
    echo = echo or (diagnosis.symptom == "hang" and not diagnosis.suspects)
    alone = diagnosis.symptom == "nan" and diagnosis.exchange
    nobody = unproven_nan(diagnosis) and not alone
    nobody = nobody or (diagnosis.symptom == "sdc" and diagnosis.cause == "unknown")
    return echo or diagnosis.cause in ("shared", "user") or nobody


def with_suspects(diagnosis: Diagnosis, failures_by_node: Mapping[str, int]) -> Diagnosis:
    """Return the diagnosis with the node that only repetition makes a suspect."""
    found = () if diagnosis.suspects else suspect_nodes(diagnosis, failures_by_node)
    if not found:
        return diagnosis
    times = ", ".join(f"{failures_by_node[node]} failures on {node}" for node in found)
    line = f"{times} without progress: a suspect by repetition alone"
    return replace(diagnosis, suspects=found, evidence=(*diagnosis.evidence, line))


def suspect_nodes(diagnosis: Diagnosis, failures_by_node: Mapping[str, int]) -> tuple[str, ...]:
    """Nodes to evict: blamed by the evidence, or failing twice without progress.

    A node that has just passed tests may fail once more, as the program may be the cause. So may
    one whose ranks died without a known cause: they move to another node first. Of several suspects
    of a hang all but one may be healthy: they are evicted the third time, if they can be spared.
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
