"""Judge one loop of the battery: what differs, and whether a message named it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.checkpoint.battery.case import Variant

OUTCOMES = (
    "silent", "raw_errors", "needless_warnings", "unseeable", "identical", "warned", "refused",
)  # fmt: skip
BAD = OUTCOMES[:3]
MOST_LOST = 2
"""Steps from the resume to the crash: the copy of the last may be incomplete."""
SAID = re.compile(r"^robust-slurm: ")
INTERNAL = re.compile(
    r"\b(Assertion|Attribute|Index|Key|Name|Recursion|UnboundLocal|ZeroDivision)Error\b"
)
"""Errors of our own, also as the reason of a refusal."""
CAUGHT = re.compile(
    r"^robust-slurm: .*?(was not saved|failed|may not be saved): \w+(Error|Exc\w+)\b"
)
"""An error that a Checkpointer caught, so that training goes on."""
REFUSED = re.compile(
    r"(robust_slurm\.)?[\w.]*CheckpointError: |[\w.]*StateError: "
    r"|(Type|Value)Error: (model|optimizer|loader|extra|rng|mesh|every)\b"
)
OTHER_RANKS = re.compile(
    r"not carried over|generators start anew|buffers of the model are those of rank 0"
    r"|differed between the ranks; all go on with"
)
"""Messages that are true of every resume on another number of ranks: what belongs to one rank."""
TABLE = re.compile(r"(?ims)^#+ *What no library can see.*?(?=^#+ |\Z)")


@dataclass(slots=True)
class Ended:
    """One run of a loop on all its ranks."""

    killed: bool = False
    """The crash came."""
    hung: bool = False
    error: str = ""
    """The error that ended a rank: its type and text; "" if none did."""
    refused: bool = False
    """A Checkpointer raised that error, when it was made or in resume()."""
    trace: str = ""
    said: tuple[str, ...] = ()
    """The Checkpointers' lines."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Digest of all that the loop returned, by path; empty if it did not end."""
    began: int = 0
    """The step that resume() returned."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Digest of the state at the last save() before the crash, or right after resume()."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a loop."""

    variant: Variant
    outcome: str
    why: str
    """The difference or the failure; empty if nothing did."""
    said: tuple[str, ...] = ()

    @property
    def unexpected(self) -> bool:
        """True if a loop that must come back identical did not."""
        return self.outcome not in ("identical", "unseeable", *self.variant.kind.also)


def judge(
    variant: Variant, reference: Ended, crashed: Ended, again: Ended | None, docs: str = ""
) -> Verdict:
    """``again``: the run that resumed, if there was one; ``docs``: docs/checkpoints.md."""
    runs = [crashed] if again is None else [crashed, again]
    said = tuple(dict.fromkeys(line for run in runs for line in run.said))

    def found(outcome: str, why: str = "") -> Verdict:
        return Verdict(variant, outcome, why, said)

    for name, run in zip(("before its crash", "resumed"), runs, strict=False):
        if slip := next(filter(CAUGHT.match, run.said), ""):
            if not REFUSED.search(slip) or INTERNAL.search(slip):
                return found("raw_errors", f"{name}: {slip}")
            return found("refused", slip)
        if run.hung:
            return found("raw_errors", f"{name}, it hung")
        if run.error:
            clear = run.refused and REFUSED.match(run.error) and not INTERNAL.search(run.error)
            return found("refused" if clear else "raw_errors", f"{name}: {run.error}")
    if again is None:
        return found("raw_errors", "it was not killed")
    lost = variant.kill - again.began
    if variant.reshaped:
        differs = [] if lost else differing(crashed.kept, again.kept)
        news = [line for line in said if not OTHER_RANKS.search(line)]
    else:
        differs = differing(reference.state, again.state)
        news = list(said)
    if not 0 <= lost <= (0 if variant.disk == "every" else MOST_LOST):
        why = f"killed in step {variant.kill}, it resumed at {again.began}"
        told = any(re.search(r"(?i)saved|checkpoint|written|hold the same", line) for line in said)
        return found("warned" if told else "silent", why)
    named = any(re.search(variant.kind.thing, line) for line in news)
    if not differs and variant.kind.hazard and named:
        return found("warned", "it came back identical, as the crash was at another moment")
    if not differs:
        return found("needless_warnings" if news else "identical")
    why = f"resumed at {again.began}: {len(differs)} differ: {', '.join(differs[:4])}"
    if named:
        return found("warned", why)
    if variant.kind.unseeable and listed(docs, variant.kind.unseeable):
        return found("unseeable", why)
    return found("silent", why)


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Paths whose values differ or that only one has; two empty states differ: nothing was seen."""
    if not one or not other:
        return ["everything (no state)"]
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))


def listed(docs: str, row: str) -> bool:
    """True if the table "What no library can see" has a row that matches."""
    table = TABLE.search(docs)
    lines: Iterable[str] = table[0].splitlines() if table else ()
    return any(line.startswith("|") and re.search(row, line, re.I) for line in lines)


def as_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON."""
    kind = verdict.variant.kind
    return {
        "kind": kind.name, "family": kind.family, "variant": verdict.variant.name,
        "outcome": verdict.outcome, "unexpected": verdict.unexpected, "why": verdict.why,
        "said": list(verdict.said),
    }  # fmt: skip
