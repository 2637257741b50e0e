"""The steps that ranks ask for, by the state before them."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """The step after ``state`` (JSON), for a rank's shares."""

    name: str
    state: str
    shares: tuple[int, ...]
    number: int = 0
    """The step's number, as far as it is known: used only to find which step comes first."""


def as_text(state: Any) -> str:
    """Return a state as JSON, the same in all processes."""
    return json.dumps(state, sort_keys=True, separators=(",", ":"))


def digest(text: str) -> str:
    """Return the name of the state that ``as_text`` has written down."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def wanted_after(state: Any, shares: tuple[int, ...] = ()) -> Wanted:
    """Return the step after a state, of which a rank has said the values."""
    text = as_text(state)
    number = state.get("step") if isinstance(state, dict) else 0
    return Wanted(digest(text), text, shares, number if type(number) is int else 0)
