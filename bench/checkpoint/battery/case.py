"""A variant of a kind of training loop: its crash and its numbers of ranks, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

SAVED, WORKING = "saved", "working"
"""Moments of a crash: right after the save() of its step, or just before the next save()."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of training loop, as its module declares it."""

    name: str
    family: str
    thing: str
    """Regular expression that a message must match to name what this kind is about."""
    options: tuple[str, ...] = ("",)
    """The kind's own variations."""
    ranks: tuple[tuple[int, int], ...] = ((1, 1),)
    """Numbers of ranks before the crash and after the resume."""
    variants: int = 2
    """Least number of variants."""
    steps: int = 10
    kills: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """Steps after whose save() the crash may come."""
    signals: tuple[str, ...] = ("SIGKILL", "SIGKILL", "SIGTERM")
    moments: tuple[str, ...] = (SAVED, WORKING)
    disk: str = ""
    """"": from memory, but from disk on another number of ranks; "every": from disk; "default":
    from disk, at the intervals that the Checkpointer chooses."""
    also: tuple[str, ...] = ()
    """Outcomes other than "identical" that are right for this kind."""
    hazard: bool = False
    """A crash at another moment would lose something: a message that names it is right at all."""
    unseeable: str = ""
    """Regular expression of this kind's row in the docs' table "What no library can see"."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One loop: a kind with everything chosen."""

    kind: Kind
    number: int
    option: str
    before: int
    """Ranks until the crash."""
    after: int
    """Ranks that resume."""
    kill: int
    moment: str
    signal: str
    disk: str

    @property
    def name(self) -> str:
        """Name for people: the kind, what was chosen, and the crash."""
        chosen = [self.option] if self.option else []
        if (self.before, self.after) != (1, 1):
            chosen.append(f"{self.before}→{self.after} ranks")
        if self.disk:
            chosen.append("disk" if self.disk == "every" else "disk at default intervals")
        chosen.append(f"{self.signal} in step {self.kill}, {self.moment}")
        return f"{self.kind.name}[{', '.join(chosen)}]"

    @property
    def reshaped(self) -> bool:
        """True if another number of ranks resumes."""
        return self.before != self.after


def variants(kind: Kind, seed: int = 0, quick: bool = False) -> list[Variant]:
    """Draw the variants of a kind; ``quick``: one."""
    pick = random.Random(f"{seed} {kind.name}")
    each = list(product(kind.options, kind.ranks))
    rounds = -(-kind.variants // len(each))
    found = []
    for number, (option, (before, after)) in enumerate(each * rounds):
        moment = kind.moments[(number + number // len(each)) % len(kind.moments)]
        disk = kind.disk or ("every" if before != after else "")
        kill, by = pick.choice(kind.kills), pick.choice(kind.signals)
        found.append(Variant(kind, number, option, before, after, kill, moment, by, disk))
    return [pick.choice(found)] if quick else found


def encode(variant: Variant) -> dict[str, Any]:
    """A variant for JSON."""
    return asdict(variant)


def decode(raw: dict[str, Any]) -> Variant:
    """Read ``encode``'s."""
    return Variant(**{**raw, "kind": decode_kind(raw["kind"])})


def decode_kind(raw: dict[str, Any]) -> Kind:
    """Read a kind from JSON, which has lists for tuples."""
    found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    kind = Kind(**found)
    return replace(kind, ranks=tuple((a, b) for a, b in kind.ranks))
