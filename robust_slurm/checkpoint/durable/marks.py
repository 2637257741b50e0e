"""Marks of durable steps: certified, or doubted. Standard library only.

``step-00000100/<attempt>-mark.json`` belongs to one attempt: when the step is saved anew, the mark
of the older attempt no longer counts. A step without a mark is neither certified nor doubted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .files import DurableError, encode, read_inside, write_whole

VERSION = 1
SUFFIX = "-mark.json"
DOUBTED = "doubted"
_LIMIT = 1 << 16  # bytes


class Mark(NamedTuple):
    """Findings about a state beyond its digests. See docs/checkpoints.md, "Certified steps"."""

    finite: bool = False
    """A finite loss was computed from it."""
    replicas: bool | None = None
    """The data-parallel ranks held the same bits. None: no ranks hold the same state."""
    doubt: str = ""
    """Reason why a recovery passed over it: it may be spoiled."""

    @property
    def certified(self) -> bool:
        return self.finite and self.replicas is not False and not self.doubt

    def __str__(self) -> str:
        if self.doubt or not self.certified:
            return DOUBTED if self.doubt else ""
        return "finite loss, equal replicas" if self.replicas else "finite loss"


def read(path: Path, attempt: str) -> Mark:
    """Return the mark of one attempt of a step's directory; an empty one if there is none or if
    this version cannot have written it."""
    try:
        data = json.loads(read_inside(path, attempt + SUFFIX, _LIMIT))
        mark = Mark(data["finite"], data["replicas"], data["doubt"])
        right = (data["version"], data["attempt"]) == (VERSION, attempt)
    except (OSError, DurableError, ValueError, KeyError, TypeError, RecursionError):
        return Mark()
    right = right and type(mark.finite) is bool and isinstance(mark.doubt, str)
    return mark if right and (mark.replicas is None or type(mark.replicas) is bool) else Mark()


def write(path: Path, attempt: str, mark: Mark) -> None:
    """Replace the mark of one attempt. Raises OSError."""
    content = {"version": VERSION, "attempt": attempt, **mark._asdict()}
    write_whole(path / (attempt + SUFFIX), encode(content))
