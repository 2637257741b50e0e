"""The collectives that torch's flight recorders of the ranks show, and who is missing in one. Pure.

A rank's newest collectives of each process group, with their sequence numbers. The first collective
of a group that some rank has not finished is the one for which the group waits: ranks whose newest
number is lower have not entered it, and ranks that have entered it with another operation or size
run another program than the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from robust_slurm.text import one_line
from srun_wrapper.locate.ranks import numbered
from srun_wrapper.locate.recorded import Recorded, RecordedCall, RecordedGroup

OLD = 1.0  # s that a rank has been in a collective until it counts as waiting: ranks are never even
SHOWN = 3  # findings
LONGEST = 400  # characters of a line
EQUAL = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})
"""Operations in which the inputs of all ranks must have the same number of elements."""
MISSING, MISMATCH, ALL_IN = "missing", "mismatch", "all in"


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective that is not finished. ``ranks``: those that are missing in it, or unlike."""

    kind: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str


def line(finding: OpenCollective) -> str:
    """Return the line of one collective that is not finished."""
    end = "; no node is suspect" if finding.kind == MISMATCH else ""
    return one_line(f"flight recorder: {finding.text}{end}", LONGEST)


def findings(
    recorded: Sequence[Recorded], expected: Collection[int] = ()
) -> tuple[OpenCollective, ...]:
    """Return the collectives for which ranks wait: first those entered unlike, then those in which
    ranks are missing, then those that all have entered. At most ``SHOWN``.

    ``expected``: all ranks of the job; of those without a recorder nothing is known.
    A rank that is missing in one group's collective because it waits in another group's is a
    victim; it is named only if nobody else is.
    """
    by_group: dict[tuple[str, str, int], dict[int, RecordedGroup]] = {}
    for one in recorded:
        for group in one.groups:
            key = (group.name, group.backend, group.members)
            by_group.setdefault(key, {}).setdefault(one.rank, group)
    silent = tuple(sorted(set(expected) - {one.rank for one in recorded}))
    found = [f for ranks in by_group.values() if (f := _of_group(ranks, silent)) is not None]
    held = {rank for finding in found for rank in finding.waiting}
    roots = [f for f in found if f.kind == MISSING and not held.issuperset(f.ranks)]
    if roots:
        found = [f for f in found if f.kind == MISMATCH or f in roots]
    order = (MISMATCH, MISSING, ALL_IN)
    found.sort(key=lambda finding: (order.index(finding.kind), finding.ranks))
    return tuple(found[:SHOWN])


def held(recorded: Sequence[Recorded]) -> dict[int, float]:
    """Map the ranks in a collective to the s for which they have been in the newest such one.

    An older one may stay open for ever, if no rank waits for it.
    """
    found: dict[int, float] = {}
    for one in recorded:
        calls = [call for group in one.groups if (call := _unfinished(group)) is not None]
        if calls:
            found[one.rank] = min(call.waited for call in calls)
    return found


def _of_group(ranks: Mapping[int, RecordedGroup], silent: Sequence[int]) -> OpenCollective | None:
    begun = {rank: _unfinished(group) for rank, group in ranks.items()}
    numbers = [call.number for call in begun.values() if call is not None]
    if not numbers or (len(ranks) < 2 and not silent):
        return None
    number = min(numbers)
    waits = {r: call for r, call in begun.items() if call is not None and call.number == number}
    longest = max(call.waited for call in waits.values())
    if longest < OLD:
        return None
    waiting = tuple(sorted(waits))
    group = next(iter(ranks.values()))
    named = f"group {group.name}"
    if group.description not in ("", "undefined", group.name):
        named += f" ({group.description})"
    where = f"{_plain(waits[waiting[0]].name)} #{number} of {named}"
    entered = {rank: call for rank, g in ranks.items() if (call := _at(g, number)) is not None}
    if unlike := _unlike(entered):
        others = sorted(set(entered) - set(unlike))
        what = _unlike_text(entered, unlike, others)
        text = f"{what} in collective #{number} of {named}: the program differs by rank (user code)"
        return OpenCollective(MISMATCH, unlike, waiting, text)
    missing = tuple(sorted(rank for rank, g in ranks.items() if g.last < number))
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        text = (
            f"{numbered(missing)} {verb} not entered {where}; "
            f"{_waiting(waiting, len(ranks) - len(missing))} {longest:.1f} s"
        )
        return OpenCollective(MISSING, missing, waiting, text)
    there = f"{numbered(waiting)} in {where} for {longest:.1f} s"
    if silent:  # they may be missing in it, or in no such group
        text = f"{there}; {numbered(silent)} did not answer"
    elif len(waiting) < len(ranks):  # some have finished it; the others may only be slower
        text = f"{there}, which the others have finished"
    else:
        text = f"all {len(ranks)} ranks are in {where} for {longest:.1f} s: none is missing in it"
    return OpenCollective(ALL_IN, (), waiting, text)


def _unfinished(group: RecordedGroup) -> RecordedCall | None:
    """Return the first collective that this rank has begun and not finished."""
    return next((call for call in group.calls if call.waited >= 0), None)


def _at(group: RecordedGroup, number: int) -> RecordedCall | None:
    return next((call for call in group.calls if call.number == number), None)


def _key(call: RecordedCall) -> tuple[str, int, str]:
    """Return what must be equal in all ranks of a collective."""
    name = _plain(call.name)
    return (name, call.items, call.kind) if name in EQUAL else (name, 0, "")


def _plain(name: str) -> str:
    """ "nccl:all_reduce" -> "all_reduce"."""
    return name.rpartition(":")[2]


def _unlike(entered: Mapping[int, RecordedCall]) -> tuple[int, ...]:
    """Return the ranks that are in another call than most; () if all are in the same."""
    counts = Counter(_key(call) for call in entered.values())
    if len(counts) < 2:
        return ()
    usual = counts.most_common(1)[0][0]
    return tuple(sorted(rank for rank, call in entered.items() if _key(call) != usual))


def _unlike_text(
    entered: Mapping[int, RecordedCall], unlike: Sequence[int], others: Sequence[int]
) -> str:
    odd, usual = entered[unlike[0]], entered[others[0]]
    verb = "calls" if len(unlike) == 1 else "call"
    verbs = "calls" if len(others) == 1 else "call"
    odd_name, usual_name = _plain(odd.name), _plain(usual.name)
    first = f"{numbered(unlike)} {verb} {odd_name} of {odd.sizes} ({odd.kind})"
    return f"{first}, {numbered(others)} {verbs} {usual_name} of {usual.sizes} ({usual.kind})"


def _waiting(waiting: Sequence[int], rest: int) -> str:
    verb = "has" if len(waiting) == 1 else "have"
    if len(waiting) == rest and rest > 1:
        return f"the other {rest} have waited in it for"
    return f"{numbered(waiting)} {verb} waited in it for"
