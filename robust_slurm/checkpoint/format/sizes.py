"""Sizes of snapshots: as people read them, and whether an estimate was right."""

from __future__ import annotations


def exceeds(size: int, estimate: int) -> bool:
    """True if a snapshot is so much larger than estimated that the user should know."""
    return size > 1.1 * estimate + 1e6


def megabytes(size: float) -> str:
    """Return a snapshot's size in words: in MB below a GB, with a decimal below ten."""
    value, unit = (size / 1e6, "MB") if size < 1e9 else (size / 1e9, "GB")
    return f"{value:.{value < 10:d}f} {unit}"
