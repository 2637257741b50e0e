"""Destinations of srun's input, and the limits that they put on a recovery's means (pure)."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import replace

from srun_wrapper.command import output_rules
from srun_wrapper.decide.ladder import Means
from srun_wrapper.protocol.task_options import STDIN_KEPT

SPENT = (
    f"stdin that a rank has read is not kept (more than {STDIN_KEPT >> 20} MiB, or its "
    "robust-task died): let the program read a file instead, or start it with --input=FILE"
)
ONLY_HERE = "ranks have read stdin, which can be replayed only on nodes of the job's own step"


class StdinFeed(enum.Enum):
    """Tasks that receive the input."""

    EVERY = "all tasks of the job's own step, the same"
    ONE = "one task"
    FILE = "all tasks, the same file"
    OWN = "each task, a file by its number or node"
    TERMINAL = "all tasks, what is typed"


def feed(value: str | None, terminal: bool) -> StdinFeed:
    """Return what srun does with ``--input=value``; ``terminal``: its own stdin is one."""
    mode = output_rules.parse_mode(value)
    if isinstance(mode, str):
        return StdinFeed.OWN if output_rules.needs_task(mode) else StdinFeed.FILE
    if terminal:
        return StdinFeed.TERMINAL
    return StdinFeed.ONE if isinstance(mode, int) else StdinFeed.EVERY


def limited(means: Means, source: StdinFeed, had: Collection[bool]) -> Means:
    """Return the means without those that would lose input.

    ``had``: one for each slot of the running ranks that has had input, True if all is kept.
    """
    if not had or source in (StdinFeed.TERMINAL, StdinFeed.FILE):
        return means
    if not all(had):
        return replace(means, never=SPENT)
    return replace(means, standby_nodes=0, spares=means.spares if source is StdinFeed.EVERY else 0)
