"""Directories of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
DATA = TESTS / "data"
PROGRAMS = TESTS / "programs"
CLUSTER = TESTS / "cluster"
SUPPORT = [str(TESTS / "support"), *map(str, sorted((TESTS / "support").glob("[a-z]*/")))]
"""For a process of its own that imports what tests import."""
