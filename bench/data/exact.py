"""Exactly once: random plans beside a reference, and one plan over random faults."""

from __future__ import annotations

from bench.common import Results
from bench.data.faults import random_faults
from bench.data.random_plans import random_plans


def exact(results: Results) -> None:
    """Look at plans first, which need no process of their own."""
    random_plans(results)
    random_faults(results)
