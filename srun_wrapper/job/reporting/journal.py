"""The events of the job, as the parts of the supervisor record them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.job.reporting.report import say
from srun_wrapper.locate.locate import Located

COUNTERS = 100  # events of error counters; reports wait in the same queue
_log = logging.getLogger("robust-srun.news")


class Journal:
    """Records events in the job's ledger, and prints news to a user who asked for details."""

    def __init__(self, ledger: JobLedger, verbose: bool) -> None:
        self._ledger = ledger
        self._verbose = verbose
        self._counters = 0

    def event(self, name: str, **fields: Any) -> None:
        self._ledger.event(name, **fields)

    def news(self, text: str) -> None:
        self.event("news", text=text)
        if self._verbose:
            say(text)
        else:
            _log.info(text)

    def spike(self, text: str) -> None:
        """Record and print that a loss or norm has jumped and stays so, or no longer does."""
        self.event("news", text=text)
        say(text)

    def counters(self, node: str, grown: Sequence[str]) -> None:
        """Record a node's grown error counters, the first ``COUNTERS`` times only."""
        if grown and self._counters < COUNTERS:
            self._counters += 1
            self.event("counters", node=node, grown=grown)

    def located(self, found: Located, lines: Sequence[str], silent: float) -> None:
        """Record and print what the ranks wait for; ``lines``: who waits for whom."""
        self.event("located", **asdict(found), silent=round(silent, 2), lines=lines)
        say(f"no step for {silent:.1f} s: {lines[0]}")
        for line in lines[1:]:
            say(f"  {line}")

    def looked_closer(self, lines: Sequence[str], news: Sequence[str]) -> None:
        """Record what a closer look has found, and print the ``news`` of it."""
        if lines:
            self.event("looked_closer", lines=lines)
        for line in news:
            say(f"  {line}")
