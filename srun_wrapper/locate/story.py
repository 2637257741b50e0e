"""Lines that say which rank waits for which, at most ten. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from robust_slurm.slurm.values import folded
from robust_slurm.text import one_line
from srun_wrapper.locate.locate import Located
from srun_wrapper.locate.ranks import RankView, StackGroup, grouped, numbered
from srun_wrapper.locate.stacks import Key, Stack, key, without_line

MOST = 10
RANKS = 3  # that are shown one by one
GROUPS = 4
LONGEST = 400  # characters of a line
FRAMES = 3  # of a rank that the others wait for


def story(views: Sequence[RankView], located: Located) -> tuple[str, ...]:
    """Return the lines: what was located, what the ranks do, and what is not known."""
    named = set(located.ranks)
    odd = [view for view in views if view.rank in named]
    lines = [_head(located)]
    for view in odd[:RANKS]:
        lines += _of_rank(view, _odd_loaders(view, views))
    if len(odd) > RANKS:
        lines.append(f"and {len(odd) - RANKS} more ranks")
    seen = sorted((view for view in views if view.kernel), key=lambda view: view.rank not in named)
    lines += [f"rank {view.rank} on {view.node}: {view.kernel}" for view in seen[:RANKS]]
    others = grouped(view for view in views if view.rank not in named)
    unknown = [view for view in views if not view.stack and view.state != "T"]
    room = MOST - len(lines) - bool(unknown)
    shown = others[: min(GROUPS, room if len(others) <= room else room - 1)]
    lines += map(_of_group, shown)
    if len(others) > len(shown):
        count = sum(len(group.ranks) for group in others[len(shown) :])
        lines.append(f"{count} more ranks in {len(others) - len(shown)} other places")
    if unknown:
        failed = next((view.failed for view in unknown if view.failed), "no answer")
        lines.append(f"no stack of {len(unknown)} of {len(views)} ranks: {failed}")
    return tuple(one_line(line, LONGEST) for line in lines[:MOST])


def _head(located: Located) -> str:
    if not located.ranks:
        return located.why
    if not located.nodes:
        return f"{located.why}; no single node stands out"
    word = "node" if len(located.nodes) == 1 else "nodes"
    return f"{located.why}; {word}: {node_list(located.nodes)}"


def _of_rank(view: RankView, other: Sequence[tuple[int, Stack]]) -> list[str]:
    calls = " < ".join(view.stack[:FRAMES])
    what = f"in {calls}" if view.stack else "its stack is not known"
    stopped = "stopped, " if view.state == "T" else ""
    lines = [f"rank {view.rank} on {view.node}: {stopped}{what}"]
    if other:
        pid, stack = other[0]
        lines.append(f"its data-loader worker {pid}: in {' < '.join(stack[:FRAMES])}")
    return lines


def _odd_loaders(view: RankView, views: Sequence[RankView]) -> list[tuple[int, Stack]]:
    """Return the workers that a rank waits for, unlike the job's other ones: pid and stack."""
    if not any("dataloader.py" in frame for frame in view.stack):
        return []
    usual = _usual_loader(views)
    return [(pid, stack) for pid, stack in view.loaders if key(stack) != usual]


def _usual_loader(views: Sequence[RankView]) -> Key:
    """Return the stack that most data-loader workers of the job have."""
    counts = Counter(key(stack) for view in views for _, stack in view.loaders)
    most = counts.most_common(1)
    return most[0][0] if most and 2 * most[0][1] > counts.total() else ()


def _of_group(group: StackGroup) -> str:
    where = f"waiting in {group.waits}" if group.waits else f"in {without_line(group.key[0])}"
    nodes = node_list([view.node for view in group.ranks])
    return f"{numbered([view.rank for view in group.ranks])} on {nodes}: {where}"


def node_list(names: Sequence[str]) -> str:
    """Return names of nodes as Slurm writes them, at most 120 characters."""
    text = folded(names)
    return text if len(text) <= 120 else f"{text[:119]}…"
