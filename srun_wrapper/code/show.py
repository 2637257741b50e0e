"""Text of robust-update (pure)."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from robust_slurm.text import one_line
from srun_wrapper.code.versions import Book, Change

_WIDTHS = (18, 10, 20, 12, 16, 12)


def listed(book: Book) -> str:
    """Return the changes of a job's code, oldest first, as a table."""
    head = ("VERSION", "KIND", "REQUESTED", "BY", "HOST", "STATE")
    lines = [_row(*head, "OUTCOME, REASON")]
    for change in book.changes:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.requested))
        words = "; ".join(filter(None, (change.outcome, change.why)))
        row = (change.version, change.kind, when, change.who, change.host, change.state)
        lines.append(_row(*row, words))
    back = book.back() or "none"
    lines.append(f"code of {one_line(book.source, 500)}; --rollback would bring back: {back}")
    return "\n".join(lines)


def record(book: Book) -> dict[str, Any]:
    """Return the same for --json."""
    whole = msgspec.to_builtins(book)
    names = ("source", "store", "versions", "changes", "progressed")
    return {"v": 1, **{name: whole[name] for name in names}, "current": book.current}


def ended(change: Change) -> tuple[str, int] | None:
    """Return how a request ended, in words, and the exit code; None: it is still under way."""
    name, outcome = change.version, change.outcome
    if change.state == "in force" and change.seconds:
        return f"code {name} is in force: {outcome}", 0
    if change.state in ("refused", "cancelled", "rolled back", "replaced"):
        return f"code {name} is {change.state}: {outcome}", 1
    return None


def _row(*cells: str) -> str:
    fixed = (f"{one_line(c, w):<{w}}" for c, w in zip(cells, _WIDTHS, strict=False))
    return "  ".join((*fixed, one_line(cells[-1], 400))).rstrip()
