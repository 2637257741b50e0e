"""A diagnosis, and the case that the rules of diagnosis look at (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from srun_wrapper.decide.ends import End, EndKind, crashes, read_end, signature
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.decide.local_nan import LocalNan
from srun_wrapper.signatures.catalogue import Catalogue

Cause = Literal["node", "shared", "user", "transient", "unknown", "ordered"]
Then = Literal[
    "evict",
    "second",
    "exchange",
    "exchange nan",
    "exchange sdc",
    "test",
    "test first",
    "test only",
    "stop",
    "stop now",
    "restart",
]

NODES_SHOWN = 8
TESTED, REPLAYED = "tests", "replay"  # ids of the rules by which these have named a node
NEWCOMER = "newcomer-error"  # id of the rule for an error that only new nodes show
# Lost nodes come first: they explain the ends of ranks. A program that ends itself when its loss
# is NaN has not failed by itself.
SYMPTOMS = ("node_lost", "stuck", "sdc", "nan", "crash", "hang", "slow", "update")
ORDER = {symptom: place for place, symptom in enumerate(SYMPTOMS)}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    symptom: Symptom
    cause: Cause
    suspects: tuple[str, ...]  # node names
    evidence: tuple[str, ...]
    signature: str  # equal for equal errors, whatever rank or node they hit
    root: Failure
    proven: tuple[str, ...] = ()  # of the suspects: those that tests or a replay have named
    cleared: frozenset[str] = frozenset()  # nodes that have passed tests now
    seen: tuple[str, ...] = ()  # nodes on which ranks died of this very error
    unreported: frozenset[str] = frozenset()
    """Nodes that are not reported: lost by a shared cause, or suspects together with others."""
    rule: str = ""  # id of the rule that has decided
    tests: Literal["later", "now", "only", "never"] = "later"
    """Time of the machine tests. later: when the failure repeats; now: at once; only: at once, and
    nothing else counts against the suspects; never: the node's own records blame the program."""
    exchange: bool = False
    """True if only the failures of its ranks speak against the node: they move before it goes."""
    ranks: tuple[str, ...] = ()
    """The ranks that have shown the symptom, where ``exchange`` is set."""
    held: tuple[str, ...] = ()
    """All ranks of that node."""


@dataclass(frozen=True)
class Case:
    """Failures that were seen together, and what the rules ask about them."""

    failures: Sequence[Failure]
    world_nodes: int
    """Number of nodes on which ranks were to run."""
    just_joined: Collection[str]
    """Nodes that have taken a place since all ranks last stepped, and have not stepped there."""
    catalogue: Catalogue
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Names of the job's nodes by the addresses and names that logs may have for them."""
    local: LocalNan | None = None
    """The ranks whose losses alone were not finite, if that is known."""
    none_started: bool = False
    """True if every rank of the job has failed, and none has ever made a step."""

    @cached_property
    def ends(self) -> list[tuple[Failure, End]]:
        """The ends of ranks, the first one first."""
        return [(f, read_end(f, self.catalogue)) for f in crashes(self.failures)]

    @cached_property
    def root(self) -> Failure:
        return root_of(self.failures, self.catalogue)

    def of(self, symptom: Symptom) -> list[Failure]:
        return [f for f in self.failures if f.symptom == symptom]

    def alike(self, sign: str) -> tuple[str, ...]:
        """The nodes on which ranks died of the error with this signature, the first death first."""
        same = (f for f, _ in self.ends if signature(f, self.catalogue) == sign)
        return tuple(dict.fromkeys(f.node for f in same))


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of diagnosis. ``decide`` returns None where the rule does not apply.

    The texts are for people: a symptom, the evidence that is required, and the verdict. ``then``
    is the consequence that ``robust-srun --robust-explain`` prints; the ladder decides it.
    """

    id: str
    symptom: str
    evidence: str
    verdict: str
    then: Then
    decide: Callable[[Case], Diagnosis | None]


def root_of(failures: Sequence[Failure], catalogue: Catalogue | None = None) -> Failure:
    """Return the failure that the others follow from.

    Lost nodes come first. Of ranks' ends those that a message of the machine explains come first,
    then the earliest; those that only follow from another rank's end come last of all.
    """

    def key(failure: Failure) -> tuple[bool, int, int, float]:
        kind = read_end(failure, catalogue).kind if failure.symptom == "crash" else EndKind.OWN
        return kind is EndKind.FOLLOWS, ORDER[failure.symptom], kind, failure.at

    return min(failures, key=key)


def without_returned(diagnosis: Diagnosis, vacant: Sequence[str]) -> Diagnosis:
    """Return the diagnosis without lost nodes that answer again; only ``vacant`` ones are gone."""
    if diagnosis.symptom != "node_lost":
        return diagnosis
    suspects = tuple(node for node in diagnosis.suspects if node in vacant)
    cause: Cause = "node" if suspects else "shared" if vacant else "transient"
    return replace(diagnosis, suspects=suspects, cause=cause)


def shared(nodes: Collection[str]) -> str:
    """The line of evidence that acquits nodes."""
    names = ", ".join(list(nodes)[:NODES_SHOWN])
    more = f" and {len(nodes) - NODES_SHOWN} more" if len(nodes) > NODES_SHOWN else ""
    return f"the same error on {names}{more}: the program, its data or a shared service"
