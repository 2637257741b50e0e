"""Lines of a closer look: what the flight recorders show, native stacks, the kernel. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from robust_slurm.text import one_line
from srun_wrapper.locate.collectives import MISMATCH, OpenCollective
from srun_wrapper.locate.ranks import numbered
from srun_wrapper.locate.story import node_list

LONGEST = 400  # characters of a line
NATIVE = 5  # innermost frames that are shown, and the first Python frame
GROUPS = 3  # of ranks that are no Python
_PYTHON = re.compile(r":\d+\)$")


@dataclass(frozen=True, slots=True)
class CloserView:
    """One process of a rank."""

    rank: int
    node: str
    what: str  # "" for the rank's own process, else such as "data-loader worker 136"
    name: str
    kernel: str
    native: Sequence[str] = ()
    failed: str = ""
    python: bool = True


def of_recorders(found: Sequence[OpenCollective]) -> tuple[str, ...]:
    """Return a line for each collective that is not finished."""
    ends = {MISMATCH: "; no node is suspect"}
    lines = (f"flight recorder: {finding.text}{ends.get(finding.kind, '')}" for finding in found)
    return tuple(one_line(line, LONGEST) for line in lines)


def of_processes(views: Sequence[CloserView]) -> tuple[str, ...]:
    """Return a line for each process that was looked at, and the ranks that are no Python by what
    they do."""
    lines = [_of_process(view) for view in views if view.python]
    groups: dict[str, list[CloserView]] = {}
    for view in views:
        if not view.python:
            groups.setdefault(f"({view.name}): {view.kernel}", []).append(view)
    most = sorted(groups.items(), key=lambda group: (len(group[1]), group[1][0].rank))
    for text, members in most[:GROUPS]:  # the few first: they are what differs
        nodes = node_list([view.node for view in members])
        ranks = numbered([view.rank for view in members])
        lines.append(f"{ranks} on {nodes}, no Python {text}")
    return tuple(one_line(line, LONGEST) for line in lines)


def _of_process(view: CloserView) -> str:
    who = f"rank {view.rank} on {view.node}" + (f", {view.what}" if view.what else "")
    if not view.native:
        why = f" (no native stack: {view.failed})" if view.failed else ""
        return f"{who}, in the kernel: {view.kernel or 'not known'}{why}"
    inner = next((n for n, frame in enumerate(view.native) if _PYTHON.search(frame)), NATIVE)
    shown = [*view.native[: min(inner, NATIVE)], *view.native[inner : inner + 1]]
    return f"{who}, native: {' < '.join(shown)} ({view.kernel})"
