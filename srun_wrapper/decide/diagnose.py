"""Diagnose failures: the first rule of a table that applies names cause and suspects (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from srun_wrapper.decide import crash
from srun_wrapper.decide.diagnosis import Case, Cause, Diagnosis, Rule
from srun_wrapper.decide.ends import crashes
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.local_nan import LocalNan
from srun_wrapper.signatures.catalogue import Catalogue, load

NONFINITE_SHOWN = 8  # ranks that are named one by one


def diagnose(
    failures: Sequence[Failure],
    world_nodes: int = 1,
    just_joined: Collection[str] = (),
    catalogue: Catalogue | None = None,
    addresses: Mapping[str, str] | None = None,
    local: LocalNan | None = None,
    *,
    none_started: bool = False,
) -> Diagnosis:
    """Name the cause and the suspect nodes of failures that were seen together.

    ``world_nodes``: number of nodes on which ranks were to run. If the command cannot be run on
    some of them only, that is those nodes' fault (a missing mount); on all of them, the user's.
    ``just_joined``: nodes that have taken a place since all ranks last stepped, and have not
    stepped there; one that cannot start a rank is proven unfit, since the same command ran
    elsewhere before, and an error that no other node shows is theirs. ``catalogue``: the
    signatures of errors; None: the built-in ones. ``addresses``: names of the job's nodes by what
    logs may call them. ``local``: the ranks whose losses alone were not finite.
    ``none_started``: every rank has failed, and none has ever made a step.
    """
    others = [f for f in failures if f.symptom != "crash"]
    ordered = [*others, *crashes(failures)]
    known = catalogue or load()
    case = Case(ordered, world_nodes, just_joined, known, addresses or {}, local, none_started)
    for rule in RULES:
        if (found := rule.decide(case)) is not None:
            return replace(found, rule=found.rule or rule.id)
    raise AssertionError("the last rule applies to every end of a rank")


def _lost(case: Case) -> Diagnosis | None:
    root = case.root
    if root.symptom not in ("node_lost", "stuck"):
        return None
    failures = case.failures
    lost = tuple(dict.fromkeys(f.node for f in failures if f.symptom in ("node_lost", "stuck")))
    others = [line for f in failures if f.node in lost for line in f.evidence]
    evidence = tuple(dict.fromkeys([*root.evidence, *others]))
    away = frozenset(f.node for f in failures if f.shared)
    own = tuple(node for node in lost if node not in away)
    cause: Cause = "node" if own else "shared"
    return Diagnosis(root.symptom, cause, own, evidence, root.symptom, root, unreported=away)


def _odd_rank_again(case: Case) -> Diagnosis | None:
    """Diagnose a machine on which replicas' states were spoilt twice, of different ranks."""
    root = case.root
    if root.symptom != "sdc" or not root.again:
        return None
    return Diagnosis("sdc", "node", root.suspects, root.evidence, "sdc", root)


def _odd_rank(case: Case) -> Diagnosis | None:
    """Diagnose a rank whose state was spoilt, see ``checkpoints/odd_ranks.py``."""
    root = case.root
    if root.symptom != "sdc":
        return None
    return Diagnosis("sdc", "unknown", root.suspects, root.evidence, "sdc", root, exchange=True)


def _hang_of_collectives(case: Case) -> Diagnosis | None:
    """Diagnose a hang in a collective that ranks have entered with different arguments."""
    root = case.root
    if root.symptom != "hang" or not root.mismatch:
        return None
    return Diagnosis("hang", "user", (), root.evidence, "hang: different collectives", root)


def _hang(case: Case) -> Diagnosis | None:
    root = case.root
    if root.symptom != "hang":
        return None
    named = root.suspects
    several = frozenset(named if len(named) > 1 else ())  # at most one of them is bad
    return Diagnosis("hang", "unknown", named, root.evidence, "hang", root, unreported=several)


def _slow(case: Case) -> Diagnosis | None:
    """Diagnose a slow node, only where slow = replace: see ``recover/slowness.py``."""
    root = case.root
    if root.symptom != "slow":
        return None
    return Diagnosis("slow", "node", root.suspects, root.evidence, "slow", root)


def _nan_of_machine(case: Case) -> Diagnosis | None:
    """Diagnose a NaN that a machine's crash explains, as both were seen together."""
    if case.root.symptom != "nan" or not case.ends:
        return None
    ends = Case(crashes(case.failures), case.world_nodes, case.just_joined, case.catalogue)
    for rule in crash.RULES:
        if (found := rule.decide(ends)) is not None:
            lines = _nan_lines(case)
            more = (*found.evidence, *lines)
            return replace(found, evidence=more, rule=rule.id) if found.cause == "node" else None
    return None


def _nan(case: Case) -> Diagnosis | None:
    """Diagnose a NaN; its cause cannot be seen: a flipped bit, the data, a learning rate.

    One rank that had it a step before all others is a reason to test its node first, no more:
    after an all-reduce every rank has it.
    """
    if case.root.symptom != "nan":
        return None
    first, *_ = found = _nonfinite(case)
    alone = first.step is not None and [f.step for f in found].count(first.step) == 1
    root = first if alone else replace(first, node="", rank=None)
    return Diagnosis("nan", "unknown", (), tuple(_nan_lines(case)), "nan", root)


def _local_nan(case: Case) -> Diagnosis | None:
    """Diagnose a NaN that one machine's ranks had alone: the machine, or these ranks' data."""
    found, local = _nan(case), case.local
    if found is None or local is None:
        return None
    own = [f for f in _nonfinite(case) if f.step == local.step and f.node == local.node]
    if not own:
        return None
    # torchrun may number its ranks in another order than their places: they cannot be followed.
    numbered = all(rank.startswith("rank ") for rank in local.ranks)
    return replace(
        found,
        root=own[0],
        suspects=(local.node,),
        evidence=(*found.evidence, local.line()),
        exchange=numbered,
        ranks=local.ranks if numbered else (),
        held=local.held,
    )


def _nonfinite(case: Case) -> list[Failure]:
    """Return the NaN failures in the order of their steps."""
    return sorted(case.of("nan"), key=lambda f: (f.step is None, f.step or 0, f.rank or 0))


def _nan_lines(case: Case) -> list[str]:
    found = _nonfinite(case)
    lines = [line for f in found[:NONFINITE_SHOWN] for line in f.evidence]
    if len(found) > NONFINITE_SHOWN:
        lines.append(f"and of {len(found) - NONFINITE_SHOWN} more ranks")
    return lines


RULES = (
    Rule(
        "node-lost",
        "node lost",
        "a node does not answer, or its ranks cannot be ended",
        "the node is to blame; no node, if several fell silent together",
        "evict",
        _lost,
    ),
    Rule(
        "odd-rank-again",
        "sdc",
        "as odd-rank, on a node on which that happened in this job before, to a rank that has "
        "moved to another node since",
        "that node is to blame",
        "evict",
        _odd_rank_again,
    ),
    Rule(
        "odd-rank",
        "sdc",
        "ranks that share their state held the same bits; then one of them, alone of at least "
        "three, holds others at two steps",
        "unknown: its node is a suspect; the next time shows if it is the machine or the program",
        "exchange sdc",
        _odd_rank,
    ),
    Rule(
        "nan-of-machine",
        "nan",
        "a loss is not finite, and a rank's end names its machine",
        "that node is to blame; the record has the id of the rule for the rank's end",
        "evict",
        _nan_of_machine,
    ),
    Rule(
        "local-nan",
        "nan",
        "at the first step with a loss that is not finite, only ranks of one node had one, and all "
        "other ranks are known to have had a finite one",
        "unknown: the node is a suspect, as its ranks' data are; the third time there decides",
        "exchange nan",
        _local_nan,
    ),
    Rule(
        "nan",
        "nan",
        "a loss is not finite",
        "unknown: the node of the one rank that had it first is tested first",
        "test",
        _nan,
    ),
    Rule(
        "hang-of-collectives",
        "hang",
        "no rank makes a step for longer than the limit, and torch's flight recorders show a "
        "collective that ranks have entered with other operations, sizes or types",
        "the program is to blame, and no node",
        "stop",
        _hang_of_collectives,
    ),
    Rule(
        "hang",
        "hang",
        "no rank makes a step for longer than the limit",
        "unknown: of the nodes whose ranks stand out only those with evidence of their own are "
        "suspects (grave error counters, a driver that does not return, a test that fails); of "
        "several together none is reported, and they are evicted the third time without progress",
        "second",
        _hang,
    ),
    Rule(
        "slow-machine",
        "slow",
        "steps stay slower than before, the others wait for the ranks of one node, and it is hot, "
        "throttled or has a degraded link; only with slow = replace and an idle spare",
        "that node is to blame",
        "evict",
        _slow,
    ),
    *crash.RULES,
)
