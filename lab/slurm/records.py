"""Parse the text of `scontrol show` (pure)."""

import datetime
import math
import re

_KEY = re.compile(r"(?<!\S)([A-Z][A-Za-z0-9_:/]*)=")


def parse_record(text: str) -> dict[str, str]:
    """One `Key=Value …` record; a value runs to the next key or the end of its line."""
    record: dict[str, str] = {}
    for line in text.splitlines():
        hits = list(_KEY.finditer(line))
        ends = [hit.start() for hit in hits[1:]] + [len(line)]
        for hit, end in zip(hits, ends, strict=False):
            record[hit[1]] = line[hit.end() : end].strip()
    return record


def parse_state(text: str) -> frozenset[str]:
    """A node state as a set of flags: "IDLE+DRAIN*" is IDLE, DRAIN and NOT_RESPONDING."""
    flags = {flag for flag in text.rstrip("*").split("+") if flag}
    if text.endswith("*"):
        flags.add("NOT_RESPONDING")
    return frozenset(flags)


def parse_nodes(text: str) -> dict[str, dict[str, str]]:
    """`scontrol show nodes -o`: each node's record by its name."""
    records = (parse_record(line) for line in text.splitlines())
    return {r["NodeName"]: r for r in records if "NodeName" in r}


# slurmctld's own reasons when a node is lost or comes back from a reboot that it did not order.
_SLURMS_OWN = ("Not responding", "Node unexpectedly rebooted")


def wants_resume(record: dict[str, str]) -> bool:
    """Return whether a healed node is DOWN by a reason of Slurm itself, so that heal may clear it.

    Never true of a drained node or of a reason that a person or a check wrote.
    """
    flags = parse_state(record.get("State", ""))
    if "DOWN" not in flags or _drained(flags):
        return False
    return record.get("Reason", "").startswith(_SLURMS_OWN)


def _drained(flags: frozenset[str]) -> bool:
    return bool(flags & {"DRAIN", "DRAINED", "DRAINING"})


def usable(record: dict[str, str], began: float = 0.0) -> bool:
    """Return whether slurmctld hears the node and does not hold it DOWN.

    A drained node counts in any case, DOWN too: it stays as it is for whoever drained it.
    With `began` (seconds since 1970) only if it heard from a slurmd that started since then; the
    record's times must be UTC.
    """
    flags = parse_state(record.get("State", ""))
    bad = {"NOT_RESPONDING", "UNKNOWN", "FUTURE"} | (set() if _drained(flags) else {"DOWN"})
    if flags & bad:
        return False
    return started(record) >= math.floor(began)


def started(record: dict[str, str]) -> int:
    """Return when the node's slurmd started, in s since 1970; 0 if slurmctld does not know."""
    try:
        at = datetime.datetime.fromisoformat(record.get("SlurmdStartTime", ""))
    except ValueError:  # "None"
        return 0
    return int(at.replace(tzinfo=datetime.UTC).timestamp())
