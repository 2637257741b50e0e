"""Sums over segments: ETTR, and lost time by phase, cause, node, user and partition. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from status.accounts.segments import Segment, within
from status.accounts.timeline import JobAccount

HOUR = 3_600_000  # ms: ByteRobust's sliding window, and the unit of GPU-hours
NOBODY = "(no node)"


def hours(gpu_ms: int) -> float:
    return gpu_ms / HOUR


def unproductive(account: JobAccount) -> int:
    """Milliseconds in which the job made no new steps."""
    return sum(s.ms for s in account.segments if not s.productive)


def ettr(account: JobAccount) -> float | None:
    """Effective training time ratio: productive time / wall-clock time (ByteRobust 2.1)."""
    whole = account.elapsed
    return None if whole <= 0 else 1.0 - unproductive(account) / whole


@dataclass(frozen=True)
class Curve:
    """ETTR over time. ``at``: ms since 1970; ``sliding``: over the last hour before each."""

    at: tuple[int, ...]
    cumulative: tuple[float, ...]
    sliding: tuple[float, ...]


def curve(account: JobAccount, points: int = 240, window: int = HOUR) -> Curve:
    """Return the cumulative and the sliding-window ETTR at evenly spaced times."""
    if account.elapsed <= 0:
        return Curve((), (), ())
    begin, end = account.begin, account.end
    count = min(points, account.elapsed)
    at = sorted({begin + (end - begin) * n // count for n in range(1, count + 1)})
    good = _Productive(account.segments)
    whole = [good.before(t) / (t - begin) for t in at]
    starts = [max(begin, t - window) for t in at]
    last = [(good.before(t) - good.before(s)) / (t - s) for t, s in zip(at, starts, strict=True)]
    return Curve(tuple(at), tuple(whole), tuple(last))


class _Productive:
    """Productive milliseconds before a time, by bisection."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._begins = [s.begin for s in segments]
        self._sums = [0, *accumulate(s.ms if s.productive else 0 for s in segments)]

    def before(self, when: int) -> int:
        at = bisect_right(self._begins, when) - 1
        if at < 0:
            return 0
        one = self._segments[at]
        part = min(when, one.end) - one.begin if one.productive else 0
        return self._sums[at] + part


@dataclass(frozen=True)
class LostTime:
    """Time and GPU time that something cost. ``incidents``: how many had a part in it."""

    name: str
    ms: int
    gpu_ms: int
    incidents: int

    @property
    def gpu_hours(self) -> float:
        return hours(self.gpu_ms)


Share = Callable[[JobAccount, Segment], Iterable[tuple[str, int, int]]]
"""Name, ms and GPU-ms of each part of a segment; the parts add up to the segment."""


def _whole(name: Callable[[JobAccount, Segment], str]) -> Share:
    """Return the share that gives a segment to one name."""
    return lambda job, one: ((name(job, one), one.ms, one.gpu_ms),)


def by_node(job: JobAccount, one: Segment) -> Iterable[tuple[str, int, int]]:
    """Share a segment equally among its nodes; the first ones get the remainder."""
    if not one.nodes:
        return ((NOBODY, one.ms, one.gpu_ms),)
    count = len(one.nodes)
    times, gpus = divmod(one.ms, count), divmod(one.gpu_ms, count)
    return tuple(
        (name, times[0] + (n < times[1]), gpus[0] + (n < gpus[1]))
        for n, name in enumerate(one.nodes)
    )


SHARES: dict[str, Share] = {
    "phase": _whole(lambda job, one: one.phase),
    "cause": _whole(lambda job, one: one.cause or "unknown"),
    "node": by_node,
    "user": _whole(lambda job, one: job.user or "?"),
    "partition": _whole(lambda job, one: job.partition or "?"),
}


def lost(accounts: Iterable[JobAccount], share: Share) -> list[LostTime]:
    """Unproductive time by name, the largest GPU time first."""
    times: dict[str, list[int]] = {}
    seen: dict[str, set[tuple[int, int]]] = {}
    for job in accounts:
        for one in job.segments:
            if one.productive:
                continue
            for name, ms, gpu_ms in share(job, one):
                entry = times.setdefault(name, [0, 0])
                entry[0] += ms
                entry[1] += gpu_ms
                if one.incident >= 0:
                    seen.setdefault(name, set()).add((job.job_id, one.incident))
    rows = [LostTime(name, t[0], t[1], len(seen.get(name, ()))) for name, t in times.items()]
    return sorted(rows, key=lambda row: (-row.gpu_ms, -row.ms, row.name))


@dataclass(frozen=True)
class Total:
    """The sum over jobs. Times in ms."""

    jobs: int
    incidents: int
    elapsed: int
    unproductive: int
    gpu_ms: int
    lost_gpu_ms: int

    @property
    def ettr(self) -> float | None:
        """Return the ETTR by GPU time: a job counts as much as its GPUs."""
        return None if self.gpu_ms <= 0 else 1.0 - self.lost_gpu_ms / self.gpu_ms


def total(accounts: Sequence[JobAccount]) -> Total:
    segments = [s for job in accounts for s in job.segments]
    bad = [s for s in segments if not s.productive]
    inside = sum(
        job.begin <= round(i.time * 1000) < job.end for job in accounts for i in job.incidents
    )
    return Total(
        len(accounts),
        inside,
        sum(s.ms for s in segments),
        sum(s.ms for s in bad),
        sum(s.gpu_ms for s in segments),
        sum(s.gpu_ms for s in bad),
    )


def since(account: JobAccount, begin: int, end: int) -> JobAccount | None:
    """The part of an account in [begin, end); None if there is none."""
    part = tuple(within(account.segments, begin, end))
    if not part:
        return None
    return replace(account, begin=part[0].begin, end=part[-1].end, segments=part)
