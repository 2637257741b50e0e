"""Read how a rank ended: the line of its output that names the cause, by the catalogue (pure)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from srun_wrapper.decide.failure import Failure, killed_by, last_error
from srun_wrapper.signatures import traps
from srun_wrapper.signatures.catalogue import Catalogue, load
from srun_wrapper.signatures.hits import ENDS, Hit, find_hits
from srun_wrapper.signatures.lines import LogLine, read_lines
from srun_wrapper.signatures.verdict import first_cause

MOST = 128  # ends that are read: reading one takes about 4 ms
NEAR = 2000  # characters before the end in which an echo of another rank's end counts
CERTAIN = 85  # least weight of a message of the machine itself, see the catalogue
# A rank that one of these signals killed could not log the cause. Only messages of the machine
# itself count; most of them are among the node's facts about the end.
MUTE = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS})
# A program's own mistake ends it by these signals; people and the kernel send others.
OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
# With these errors a start fails also where a limit of the user or of the job is reached.
LIMIT = re.compile(r"Resource temporarily unavailable|Cannot allocate memory", re.IGNORECASE)
PASSING = re.compile(  # errors that are often gone at the next start
    rf"{LIMIT.pattern}|\b(EAGAIN|ENOMEM|EADDRINUSE|EAI_AGAIN)\b|Address already in use"
    r"|Temporary failure in name resolution",
    re.IGNORECASE,
)
NETWORK = frozenset({"tcp", "ib"})  # layers whose vague errors are symptoms of another rank's end


class EndKind(IntEnum):
    """The classes of ends: the first cause is of the lowest class that any end has."""

    MACHINE = 0  # shown by a message of the machine about this node
    OWN = 1
    FOLLOWS = 2  # caused by another rank's end, or by the network between ranks


@dataclass(frozen=True, slots=True)
class End:
    """The end of one rank.

    ``hit``: the line that names its cause; None: no line is known. ``works``: its lines about
    collectives.
    """

    kind: EndKind
    killer: int | None
    hit: Hit | None = None
    works: tuple[LogLine, ...] = ()

    @property
    def blame(self) -> str:
        """The party that the line blames; "" without a line that names a cause."""
        if self.hit is None or self.kind is EndKind.FOLLOWS:
            return ""
        return self.hit.signature.blame

    @property
    def bus_error(self) -> bool:
        """True for SIGBUS: memory or storage of the node, or a file that was cut while mapped."""
        return self.killer == signal.SIGBUS

    @property
    def left_over(self) -> bool:
        """True if a process that is not the rank holds most of the GPU's memory."""
        oom = self.hit is not None and self.hit.signature.id == "cuda-oom"
        return oom and self.hit is not None and traps.left_by_another(self.hit)

    @property
    def points(self) -> bool:
        """True if a node may be at fault; it is not known yet whether it is this node alone."""
        if self.kind is EndKind.MACHINE or self.blame in ("node", "external"):
            return True
        precise = self.hit is not None and self.hit.weight >= traps.PRECISE
        evict = self.hit is not None and self.hit.signature.evict != "no"
        return self.blame == "unknown" and precise and evict


def read_end(failure: Failure, catalogue: Catalogue | None = None) -> End:
    """Return what the end of the rank says; None as catalogue: the built-in one."""
    return _read(failure.tail, failure.facts, failure.node, killed_by(failure), catalogue or load())


def may_be_the_programs(failure: Failure, catalogue: Catalogue | None = None) -> bool:
    """Return True if nothing says that a machine, another rank or somebody else ended the rank.

    Nor may it be an error that passes by itself.
    """
    if PASSING.search(failure.tail):
        return False
    end = read_end(failure, catalogue)
    own = end.killer is None or end.killer in OWN_SIGNALS
    here = end.kind is EndKind.OWN and not end.points and not end.left_over
    return own and here and end.blame in ("", "user")


def crashes(failures: Iterable[Failure]) -> list[Failure]:
    """Return the ends of ranks that are read, in their order in time.

    Of more than MOST, the first ends of nodes come before their others, and a failed start of every
    node is among them: what all nodes show is no node's fault.
    """
    ends = sorted((f for f in failures if f.symptom == "crash"), key=lambda f: f.at)
    if len(ends) <= MOST:
        return ends
    firsts = sorted({f.node: f for f in reversed(ends)}.values(), key=lambda f: f.at)
    read = list({id(f): f for f in (*firsts[: MOST // 2], *ends)}.values())[:MOST]
    starts = {f.node: f for f in reversed(ends) if not f.launched}.values()
    return sorted({id(f): f for f in (*read, *starts)}.values(), key=lambda f: f.at)


def signature(failure: Failure, catalogue: Catalogue | None = None) -> str:
    """Return a text that is equal for the same error on any rank, address or step."""
    end = read_end(failure, catalogue) if failure.symptom == "crash" else None
    killed = killed_by(failure) == signal.SIGKILL
    if end is not None and end.hit is not None and (end.points or killed):
        return f"crash: {end.hit.signature.layer}"
    how = f"signal {failure.signal}" if failure.signal else f"exit {failure.code}"
    if killed:
        return f"{failure.symptom}: {how}"  # it cannot have logged a reason
    text = re.sub(r"^\[rank\d+\]:?\s*", "", last_error(failure.tail))
    text = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    return f"{failure.symptom}: {how}: {text}"[:300]


def odd_collective(ends: Sequence[tuple[Failure, End]]) -> tuple[Failure, LogLine] | None:
    """Return the rank whose collective has another kind or size than the others', and its line."""
    lines = [
        (failure, line if line.rank is not None else replace(line, rank=failure.rank))
        for failure, end in ends
        for line in end.works
    ]
    found = traps.different_collectives([line for _, line in lines])
    return next(((failure, line) for failure, line in lines if line is found), None)


@lru_cache(maxsize=1 << 15)  # an end of each node of a large job
def _read(
    tail: str, facts: tuple[str, ...], node: str, killer: int | None, catalogue: Catalogue
) -> End:
    said = "".join(f"\n{fact}" for fact in facts)  # by the node, so after the rank's own lines
    lines = read_lines(tail + said)
    near = len(lines) - tail[-NEAR:].count("\n") - len(facts)
    hits = [
        hit
        for hit in find_hits(lines, catalogue)
        if hit.signature.id not in ENDS
        and (hit.root or hit.number >= near or killer)
        and (killer not in MUTE or (hit.root and hit.weight >= CERTAIN))
    ]
    hit = first_cause(hits)
    works = tuple(line for line in lines if "WorkNCCL" in line.text)
    here = hit is None or _same(hit.node, node)
    echoes = killer in (None, signal.SIGABRT)  # ends that may follow from another rank's
    if hit is None or not (here or echoes):
        return End(EndKind.OWN, killer, None, works)
    if hit.signature.evict == "yes" and here:
        return End(EndKind.MACHINE, killer, hit, works)
    vague = hit.signature.layer in NETWORK and hit.weight < traps.PRECISE
    elsewhere = hit.signature.blame == "node" and not here
    if echoes and (not hit.root or vague or elsewhere):
        return End(EndKind.FOLLOWS, killer, hit, works)
    return End(EndKind.OWN, killer, hit, works)


def _same(named: str, node: str) -> bool:
    """True if a line names no node, or this one; a domain after either name does not matter."""
    return named.partition(".")[0] in ("", node.partition(".")[0])
