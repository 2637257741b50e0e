"""Judge a log: its first cause, the layer, who is to blame, and the node to evict (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from srun_wrapper.signatures import traps
from srun_wrapper.signatures.catalogue import Catalogue, load
from srun_wrapper.signatures.hits import Hit, earliest, find_hits
from srun_wrapper.signatures.lines import LogLine, read_lines

TIERS = (85, 60, 40, 20)  # of roots: of the first tier that has any, the earliest is the cause
CASCADES = (15, 5, 1)
EVIDENCE = 8
LAUNCHER = 6  # cascades up to this weight only report that a rank failed
ERROR = re.compile(r"\b(error|fatal|failed|failure|exception|panic|abort(ed)?|killed)\b", re.I)
NO_ERROR = re.compile(r"\b(0|no) (errors?|failures?)\b|WARN|errors?[=:] ?0\b", re.I)
STATED = re.compile(r"\W{0,3}(?:\w+ ){0,3}\w*(?:error|fatal|exception)\b[^:]{0,20}: ", re.I)
INITIAL = re.compile(r"barrier|init_process_group|set_device|ncclCommInit|_lazy_init|init\.cc")
SHARED_ADVICE = "Several nodes show it: look at what they share. No node is evicted."


@dataclass(frozen=True, slots=True)
class LogVerdict:
    cause: str
    layer: str
    blame: str
    rule: str  # the rule or signature that decided
    advice: str
    first: LogLine | None = None  # the line that names the first cause
    evict: tuple[str, ...] = ()  # nodes that are proven bad
    suspects: tuple[str, ...] = ()  # nodes to test, or to evict the second time
    evidence: tuple[LogLine, ...] = ()
    followers: int = 0  # lines that only follow from it


def judge(log: str, catalogue: Catalogue | None = None) -> LogVerdict:
    """Name the first cause of the failure that the log shows."""
    lines = read_lines(log)
    return decide(lines, find_hits(lines, catalogue or load()))


def decide(lines: Sequence[LogLine], hits: Sequence[Hit]) -> LogVerdict:
    """Choose among the hits, the traps first."""
    if hit := traps.preempted(hits):
        return _verdict(hit, hits, "preempted", lines)
    if hit := traps.time_limit(hits):
        return _verdict(hit, hits, "time-limit", lines)
    hits = [hit for hit in hits if hit.signature.id != "time-limit"]
    chosen = first_cause(hits)
    vague = chosen is None or chosen.weight < traps.PRECISE
    if vague and (odd := traps.different_collectives(lines)):
        return LogVerdict(
            "One rank's collective has another kind or size than the others'",
            "user_code",
            "user",
            "different-collectives",
            "Look for a branch or a batch that only this rank has.",
            odd,
            evidence=(odd,),
        )
    if chosen is None:
        return _unknown(lines)
    if not chosen.root and chosen.weight <= LAUNCHER:
        known = {hit.number for hit in hits}
        before = [line for line in lines[: chosen.number - 1] if line.number not in known]
        if any(STATED.match(line.text) for line in before):
            return _unknown([line for line in before if STATED.match(line.text)])
    if chosen.signature.id == "cuda-oom" and _left_over(lines, hits, chosen):
        return LogVerdict(
            "A GPU's memory is used up by a process that does not belong to this job",
            "gpu_oom",
            "node",
            "left-by-another",
            "Look for processes that an earlier job left on the GPU; end them, then start again.",
            chosen.line,
            suspects=(chosen.node,) if chosen.node else (),
            evidence=(chosen.line,),
        )
    return _verdict(chosen, hits, chosen.signature.id, lines)


def first_cause(hits: Sequence[Hit]) -> Hit | None:
    """Return the earliest hit of the heaviest class that any hit has; roots before cascades."""
    for floor in TIERS:
        if hit := earliest(h for h in hits if h.root and h.weight >= floor):
            return hit
    for floor in CASCADES:
        if hit := earliest(h for h in hits if h.weight >= floor):
            return hit
    return None


def _verdict(hit: Hit, hits: Sequence[Hit], rule: str, lines: Sequence[LogLine]) -> LogVerdict:
    signature = hit.signature
    alike = [h for h in hits if h.root and h.signature.layer == signature.layer]
    nodes = tuple(dict.fromkeys(h.node for h in alike if h.node))
    blame, advice = signature.blame, signature.advice
    evict: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    if signature.layer == "ib":
        peer, reporters = traps.named_peer(alike)
        suspects = (peer,) if peer and reporters > 1 else (hit.node,) if hit.node else ()
        if peer and reporters > 1:
            advice = f"All reports name {peer}: test it; it may be the victim. {advice}"
    elif len(nodes) > 1 and signature.evict != "no":
        rule, advice = f"{rule}, shared", f"{SHARED_ADVICE} {advice}"
        blame = "external" if blame == "node" else blame
    elif proven := {h.node for h in alike if h.node and h.signature.evict == "yes"}:
        evict = tuple(proven)  # one: the same symptom is on no other node
    elif hit.node and signature.evict == "after_test":
        suspects = (hit.node,)
    elif signature.evict != "no" and not nodes:
        named = {line.node for line in lines if line.node}
        suspects = tuple(named) if len(named) == 1 else ()  # the only node that the log names
    shown = sorted({h.number: h.line for h in [hit, *alike]}.values(), key=lambda x: x.number)
    return LogVerdict(
        signature.cause,
        signature.layer,
        blame,
        rule,
        advice,
        hit.line,
        evict,
        suspects,
        tuple(shown[:EVIDENCE]),
        sum(not h.root for h in hits),
    )


def _left_over(lines: Sequence[LogLine], hits: Sequence[Hit], oom: Hit) -> bool:
    """Return True for memory that another process holds: its size, or the first call fails."""
    alike = [h for h in hits if h.signature.id == "cuda-oom"]
    if len({h.line.rank for h in alike}) > 1 and len({h.node for h in alike}) != 1:
        return False
    if traps.left_by_another(oom):
        return True
    if any(line.step is not None for line in lines[: oom.number - 1]):
        return False
    if "Tried to allocate" in oom.line.text:
        return False
    return any(INITIAL.search(line.text) for line in lines[max(0, oom.number - 25) : oom.number])


def _unknown(lines: Sequence[LogLine]) -> LogVerdict:
    said = [line for line in lines if ERROR.search(line.text) and not NO_ERROR.search(line.text)]
    first = said[0] if said else None
    return LogVerdict(
        "No known error",
        "unknown",
        "unknown",
        "unknown",
        "No node is evicted. Look at the stacks and at the kernel logs of the nodes.",
        first,
        evidence=(first,) if first else (),
    )
