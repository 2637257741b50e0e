"""Words that a line must contain for a pattern to match: looking for them is 20 times faster."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHORTEST = 3  # shorter words are in every line


def needed(pattern: str) -> tuple[str, ...] | None:
    """Return words, in lower case, of which a match contains at least one. None: not known."""
    try:
        from re import _parser  # type: ignore[attr-defined]  # the same tree that re compiles
    except ImportError:
        return None
    found = _of_sequence(_parser.parse(pattern, re.IGNORECASE))
    return tuple(sorted(found)) if found else None


def _of_sequence(items: Iterable[tuple[Any, Any]]) -> frozenset[str] | None:
    """Return the best word set of parts that all must match: the one whose shortest is longest."""
    best: frozenset[str] | None = None
    word = ""
    for operator, value in [*items, (None, None)]:
        if str(operator) == "LITERAL" and value < 128:
            word += chr(value).lower()
            continue
        for each in (frozenset([word]) if len(word) >= SHORTEST else None, _of(operator, value)):
            if each and (best is None or _worth(each) > _worth(best)):
                best = each
        word = ""
    return best


def _of(operator: object, value: Any) -> frozenset[str] | None:
    match str(operator):
        case "BRANCH":
            parts = [_of_sequence(each) for each in value[1]]
            known = [each for each in parts if each]
            return frozenset().union(*known) if len(known) == len(parts) else None
        case "SUBPATTERN":
            return _of_sequence(value[3])
        case "MAX_REPEAT" | "MIN_REPEAT" if value[0] > 0:
            return _of_sequence(value[2])
    return None


def _worth(words: frozenset[str]) -> float:
    return min(map(len, words)) - len(words) / 100
