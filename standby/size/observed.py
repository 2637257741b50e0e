"""Compute rates from lost nodes and watched time. Pure.

The count and the time must be of the same nodes: an incident counts if its job was watched
then, a drain of the node gate if that node was in a watched job then. With node-days given by a
person, who knows for which nodes they stand, everything counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from standby.size.count import LossSource
from standby.size.history import DAY, Loss, Span

TOGETHER_S = 60.0  # what is lost within this time is one event: a switch, a group, a power feed
SAME_FAULT_S = 3600.0  # a node that is lost again so soon is the same fault seen twice
NEAR_S = 60.0  # an incident is noted a little after the epoch's end

Watched = dict[str, list[tuple[float, float]]]  # by node: times in order that do not overlap


class Observed(NamedTuple):
    """The counts. ``sizes``: events by the number of nodes they took; times in s since 1970."""

    node_days: float
    given: bool  # the node-days are a person's
    begin: float | None
    end: float | None
    jobs: int
    nodes: int
    incidents: int
    drains: int
    left_out: int  # losses of nodes and times that nobody watched
    sizes: Mapping[int, int]
    problems: tuple[str, ...]

    @property
    def events(self) -> int:
        return sum(self.sizes.values())

    def sources(self) -> list[LossSource]:
        """The rates that were seen, by the number of nodes that an event took."""
        sizes = {1: 0, **self.sizes}
        return [LossSource(size, n / self.node_days) for size, n in sorted(sizes.items())]


def merge(spans: Iterable[Span]) -> Watched:
    """Merge the spans of each node, so that time which several records tell of counts once."""
    out: Watched = {}
    for span in sorted(spans):
        times = out.setdefault(span.node, [])
        if times and span.begin <= times[-1][1]:
            times[-1] = (times[-1][0], max(times[-1][1], span.end))
        else:
            times.append((span.begin, span.end))
    return out


def clip(spans: Iterable[Span], since: float) -> list[Span]:
    """Return the parts of the spans after ``since``."""
    return [s._replace(begin=max(s.begin, since)) for s in spans if s.end > since]


def node_days(watched: Watched) -> float:
    return sum(end - begin for times in watched.values() for begin, end in times) / DAY


def within(watched: Watched, node: str, when: float, near: float = 0.0) -> bool:
    times = watched.get(node, ())
    return any(begin - near <= when <= end + near for begin, end in times)


def watched_losses(losses: Iterable[Loss], jobs: Mapping[int, Watched]) -> list[Loss]:
    """Return the losses at watched times. ``jobs``: watched times by job id."""
    everywhere = merge(
        Span(node, begin, end)
        for watched in jobs.values()
        for node, times in watched.items()
        for begin, end in times
    )
    out = []
    for loss in losses:
        if loss.gate:
            seen = all(within(everywhere, node, loss.time) for node in loss.nodes)
        else:
            own = jobs.get(loss.job, {})
            seen = any(within(own, node, loss.time, NEAR_S) for node in own)
        if seen:
            out.append(loss)
    return out


def events(losses: Iterable[Loss]) -> list[int]:
    """Return the number of nodes of each event, in the order of time.

    A node counts once where a drain repeats what its job's incident said, or where it was lost
    again within SAME_FAULT_S. Losses within TOGETHER_S of the first are one event.
    """
    last: dict[str, float] = {}
    by_job: set[tuple[str, int]] = set()
    out: list[int] = []
    began = float("-inf")
    for loss in sorted(losses, key=lambda loss: (loss.time, loss.gate)):
        fresh = [
            node
            for node in loss.nodes
            if loss.time - last.get(node, float("-inf")) > SAME_FAULT_S
            and not (loss.gate and (node, loss.job) in by_job)
        ]
        for node in loss.nodes:
            last[node] = loss.time
            if not loss.gate:
                by_job.add((node, loss.job))
        if not fresh:
            continue
        if loss.time - began <= TOGETHER_S:
            out[-1] += len(fresh)
        else:
            out.append(len(fresh))
            began = loss.time
    return out


def observe(
    losses: Sequence[Loss],
    jobs: Mapping[int, Sequence[Span]],
    problems: Sequence[str],
    given_node_days: float | None = None,
    since: float = 0.0,
) -> Observed:
    """Count losses and watched time. ``given_node_days``: the watched time by a person's count."""
    recent = [loss for loss in losses if loss.time > since]
    watched = {job: merge(clip(spans, since)) for job, spans in jobs.items()}
    watched = {job: times for job, times in watched.items() if times}
    counted = recent if given_node_days is not None else watched_losses(recent, watched)
    everywhere = merge(span for spans in jobs.values() for span in clip(spans, since))
    times = [t for each in everywhere.values() for pair in each for t in pair]
    times += [loss.time for loss in counted]
    return Observed(
        node_days=node_days(everywhere) if given_node_days is None else given_node_days,
        given=given_node_days is not None,
        begin=min(times, default=None),
        end=max(times, default=None),
        jobs=len(watched),
        nodes=len(everywhere),
        incidents=sum(not loss.gate for loss in counted),
        drains=sum(loss.gate for loss in counted),
        left_out=len(recent) - len(counted),
        sizes=dict(Counter(events(counted))),
        problems=tuple(problems),
    )
