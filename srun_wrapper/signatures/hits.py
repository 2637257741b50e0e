"""The lines of a log that match a signature, weighed by where they stand (pure)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from srun_wrapper.signatures.catalogue import Catalogue, Signature
from srun_wrapper.signatures.lines import LogLine

KEPT = 6  # first and last lines per signature and node: enough for every rule
HEALED = 3  # steps that a training makes after an error that did not end it
WARNED = 4  # greatest weight of a line that its logger calls a warning or information …
CERTAIN = 90  # … unless its weight is at least this: a message of the scheduler or the machine
ECHO = 15  # cascades from this weight on: ends that follow them are echoes
WARNING = re.compile(
    r"\[?\bWARN(ING)?\b\]?(?!.*NCCL WARN)|^\[?W\d{0,4} |NCCL INFO|\| ?W(ARN\w*)? ?\|"
)
NO_WARNING = re.compile(r"NCCL WARN|\bXid\b|kernel:|NVRM")
IGNORED = "ignored-exception"
EXCEPTION = re.compile(r"^(\w+\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt)\b")
SOURCE = re.compile(r'File "[^"]*", line \d+|raise \w|[│╭╰❱]|frame #\d+|#\d+ +0x|[~^]+$')
ENDS = frozenset({"killed", "segfault", "bus-error", "abort"})  # ways to end, not causes


@dataclass(frozen=True, slots=True)
class Hit:
    line: LogLine
    signature: Signature
    weight: int
    node: str = ""  # the node that the line speaks of

    @property
    def root(self) -> bool:
        return self.signature.role == "root"

    @property
    def number(self) -> int:
        return self.line.number


def find_hits(lines: Sequence[LogLine], catalogue: Catalogue) -> list[Hit]:
    """Return the hits in the log's order, without those that the training survived."""
    known: dict[str, tuple[Signature, str] | None] = {}
    ignoring: set[tuple[int | None, int | None]] = set()
    found: list[Hit] = []
    steps: list[tuple[int, int]] = []
    warned: list[Hit] = []
    files: set[tuple[int | None, int | None]] = set()  # those whose last line was part of a stack
    for line in lines:
        text = line.text.strip()
        quoted = (line.rank, line.task) in files and line.text[:1].isspace()
        files.discard((line.rank, line.task))
        if SOURCE.match(text):
            files.add((line.rank, line.task))
            continue
        if not text or quoted:
            continue
        if text not in known:
            known[text] = catalogue.match(text)
        match = known[text]
        who = (line.rank, line.task)
        if who in ignoring and EXCEPTION.match(text):
            ignoring.discard(who)
            continue
        if match is None:
            if line.step is not None:
                steps.append((line.number, line.step))
            continue
        signature, named = match
        if signature.id == IGNORED:
            ignoring.add(who)
        if signature.weight == 0:
            continue
        weight = signature.weight
        hit = Hit(line, signature, weight, named or line.node)
        if _is_warning(line) and weight < CERTAIN:
            warned.append(hit)
        else:
            found.append(hit)
    found = _with_warnings(found, warned)
    return _without_echoes(_without_survived(_thinned(found), steps))


def _is_warning(line: LogLine) -> bool:
    return bool(WARNING.search(line.text[:80]) and not NO_WARNING.search(line.raw))


def _with_warnings(found: Sequence[Hit], warned: Sequence[Hit]) -> list[Hit]:
    """Add the warnings: as the error's first line where the same error follows, else weakly."""
    last = {hit.signature.id: hit.number for hit in found}
    kept = [
        hit
        if last.get(hit.signature.id, 0) > hit.number
        else replace(hit, weight=min(hit.weight, WARNED if hit.root else 5))
        for hit in warned
    ]
    return sorted([*found, *kept], key=lambda hit: hit.number)


def _thinned(hits: Sequence[Hit]) -> list[Hit]:
    """Keep the first and last hits of each signature on each node."""
    groups: dict[tuple[str, str], list[Hit]] = {}
    for hit in hits:
        groups.setdefault((hit.signature.id, hit.node), []).append(hit)
    kept = [hit for group in groups.values() for hit in _ends(group)]
    return sorted(kept, key=lambda hit: hit.number)


def _ends(group: list[Hit]) -> list[Hit]:
    return group if len(group) <= 2 * KEPT else group[:KEPT] + group[-KEPT:]


def _without_survived(hits: Sequence[Hit], steps: Sequence[tuple[int, int]]) -> list[Hit]:
    """Drop errors after which the training made new steps: a retry, a spike that healed."""
    numbers = [number for number, _ in steps]
    kept = []
    for hit in hits:
        at = bisect_right(numbers, hit.number)
        reached = max((step for _, step in steps[max(0, at - 50) : at]), default=-1)
        later: set[int] = set()
        for _, step in steps[at : at + 200]:
            if step > reached:
                later.add(step)
            if len(later) >= HEALED:
                break
        if len(later) < HEALED or (reached < 0 and hit.signature.evict == "yes"):
            kept.append(hit)
    return kept


def _without_echoes(hits: Sequence[Hit]) -> list[Hit]:
    """Drop bare kills and crashes that come after a failed collective: teardown."""
    first = min((hit.number for hit in hits if not hit.root and hit.weight >= ECHO), default=None)
    return [
        hit for hit in hits if first is None or hit.signature.id not in ENDS or hit.number < first
    ]


def earliest(hits: Iterable[Hit]) -> Hit | None:
    """Return the first hit; by the clock where all have one and it says so, else by the line."""
    group = list(hits)
    if not group:
        return None
    times = [hit.line.at for hit in group]
    if all(at is not None for at in times):
        return min(group, key=lambda hit: (round(hit.line.at or 0.0), hit.number))
    return min(group, key=lambda hit: hit.number)
