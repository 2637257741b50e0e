"""Cases in which a plain reading of a log would blame the wrong party, one rule each (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from srun_wrapper.signatures.hits import Hit
from srun_wrapper.signatures.lines import LogLine

BEFORE_S = 120.0  # an error this long before a preemption has nothing to do with it
PRECISE = 60
VAGUE_ENDS = frozenset({"ib", "tcp", "sdc_nan"})  # they end a training from weight 40 on
WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
GROUP = re.compile(r"\[PG (?:ID )?(\S+(?: PG GUID \S+)?)(?: \([^)]*\))? Rank \d+\]")
PAIRED = frozenset({"SEND", "RECV", "COALESCED", "P2P", "GATHER", "SCATTER", "ALLTOALL"})
SIZE = r"([\d.]+) ([KMGT]i?B|bytes)"
OLD_OOM = re.compile(rf"{SIZE} total capacity; {SIZE} already allocated; {SIZE} free", re.I)
NEW_OOM = re.compile(rf"total capacity of {SIZE} of which {SIZE} is free", re.I)
THIS_PROCESS = re.compile(rf"this process has {SIZE} memory in use", re.I)
OTHERS = re.compile(r"Process \d+ has [\d.]+ \w+ memory in use")
UNITS = {"b": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
PEER = re.compile(r"(?:from|with) peer ([\w.:-]+?)(?:<|\s|$)")


def preempted(hits: Sequence[Hit]) -> Hit | None:
    """Return the preemption: errors near it or after it are what its SIGKILL makes peers report."""
    found = next((hit for hit in hits if hit.signature.layer == "preemption"), None)
    if found is None or found.weight < PRECISE:
        return None
    own = found.line.at
    for hit in hits:
        at = hit.line.at if hit.root and hit.weight >= PRECISE else None
        if own is not None and at is not None and own - at > BEFORE_S:
            return None
    return found


def time_limit(hits: Sequence[Hit]) -> Hit | None:
    """Return the time limit if nothing had failed before: a hung job also runs into it."""
    found = next((hit for hit in hits if hit.signature.id == "time-limit"), None)
    if found is None:
        return None
    before = [
        hit
        for hit in hits
        if hit.number < found.number
        and hit.signature.id != "time-limit"
        and (
            hit.weight >= PRECISE
            or (hit.weight >= 40 and hit.signature.layer in VAGUE_ENDS)
            or hit.signature.id == "watchdog-timeout"
        )
    ]
    return None if before else found


def different_collectives(lines: Sequence[LogLine]) -> LogLine | None:
    """Return the line of the rank whose collective has another kind or size than the others'.

    The sequence number counts within a process group: groups are told apart where torch names
    them. A pair of send and receive, or a collective whose parts differ, is no mismatch.
    """
    groups: dict[int | None, set[str]] = {}
    for line in lines:
        if m := GROUP.search(line.text):
            groups.setdefault(line.rank, set()).add(m[1])
    works: dict[tuple[str, str], dict[int | None, tuple[tuple[str, str], LogLine]]] = {}
    for line in lines:
        if "WorkNCCL" not in line.text or not (work := WORK.search(line.text)):
            continue
        if any(work[2].upper().startswith(kind) for kind in PAIRED) or line.rank is None:
            continue
        own = GROUP.search(line.text)
        names = {own[1]} if own else groups.get(line.rank, {""})
        if len(names) != 1:
            continue
        form = (work[2], work[3] or "")
        works.setdefault((min(names), work[1]), {}).setdefault(line.rank, (form, line))
    for ranks in works.values():
        forms = Counter(form for form, _ in ranks.values())
        if len(forms) > 1:
            rarest = min(forms, key=lambda form: forms[form])
            alone = [line for form, line in ranks.values() if form == rarest]
            tied = len(set(forms.values())) == 1
            each = [line for _, line in ranks.values()] if tied else alone
            return min(each, key=lambda line: line.number)
    return None


def left_by_another(hit: Hit) -> bool:
    """Return True if most of the GPU's memory belongs to a process that is not this one."""
    text = hit.line.text
    if m := OLD_OOM.search(text):
        total, own, free = _size(m[1], m[2]), _size(m[3], m[4]), _size(m[5], m[6])
    elif m := NEW_OOM.search(text):
        mine = THIS_PROCESS.search(text)
        if mine is None or len(OTHERS.findall(text)) > 2:  # all ranks on one GPU: the program
            return False
        total, free, own = _size(m[1], m[2]), _size(m[3], m[4]), _size(mine[1], mine[2])
    else:
        return False
    return total - free - own > 0.4 * total and own < 0.3 * total


def _size(number: str, unit: str) -> float:
    try:
        return float(number) * UNITS[unit[0].lower()]
    except (ValueError, KeyError):
        return 0.0


def named_peer(hits: Sequence[Hit]) -> tuple[str, int]:
    """Return the one peer that all reports of failed transfers name, and how many nodes report."""
    peers: Counter[str] = Counter()
    reporters = set()
    for hit in hits:
        if hit.signature.layer == "ib" and (m := PEER.search(hit.line.text)):
            peers[m[1]] += 1
            reporters.add(hit.node)
    return (next(iter(peers)), len(reporters)) if len(peers) == 1 else ("", len(reporters))
