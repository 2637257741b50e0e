"""A job's time as segments without gap or overlap, in whole milliseconds. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

TRAINING = "training"
INCIDENT_PHASES = ("detect", "decide", "stop", "test", "replace", "restore", "launch", "first_step")
REDONE = "redone"
DEGRADED = "degraded"
PHASES = (
    *(TRAINING, "queued", "script", "start_up", *INCIDENT_PHASES, REDONE, "ending"),
    DEGRADED,
)
"""All phases. queued: the job waits in Slurm after a requeue; script: it runs, robust-srun does
not; start_up: until the first step; redone: steps that were done before; ending: after an incident
that ended the run; degraded: of a time of
training with fewer ranks (min_nodes), the share of those that were missing."""
PHASE_NAMES = {
    "first_step": "first step",
    "start_up": "start-up",
    REDONE: "steps done twice",
    DEGRADED: "missing ranks",
    "queued": "in the queue",
    "script": "outside robust-srun",
}
"""Phase → its name for people, where that is another word."""
CHUNKS = 200  # that a degraded time is divided into at most, each with its two shares
CHUNK = 60_000  # ms, or more


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a job's time with one use. ``begin`` and ``end``: ms since 1970."""

    begin: int
    end: int
    phase: str
    cause: str = ""  # of unproductive time: node, shared, user, … of its incident; start, script
    symptom: str = ""
    incident: int = -1  # index into the job's incidents; -1: none
    nodes: tuple[str, ...] = ()  # that the incident names
    gpus: int = 0

    @property
    def ms(self) -> int:
        return self.end - self.begin

    @property
    def productive(self) -> bool:
        return self.phase == TRAINING

    @property
    def gpu_ms(self) -> int:
        return self.ms * self.gpus


def in_order(wanted: Iterable[Segment], begin: int, end: int) -> list[Segment]:
    """Clip to [begin, end) and to each other: of two that overlap, the earlier one keeps the time.

    Time is thereby counted once, for the incident that was first.
    """
    done: list[Segment] = []
    cursor = begin
    for one in sorted(wanted, key=lambda s: s.begin):
        clipped = replace(one, begin=max(one.begin, cursor), end=min(one.end, end))
        if clipped.end > clipped.begin:
            done.append(clipped)
            cursor = clipped.end
    return done


def filled(taken: Sequence[Segment], begin: int, end: int, rest: Segment) -> list[Segment]:
    """Fill what ``taken`` (in order) leaves of [begin, end) with ``rest``."""
    done: list[Segment] = []
    cursor = begin
    for one in taken:
        if one.begin > cursor:
            done.append(replace(rest, begin=cursor, end=one.begin))
        done.append(one)
        cursor = one.end
    if end > cursor:
        done.append(replace(rest, begin=cursor, end=end))
    return done


def within(segments: Iterable[Segment], begin: int, end: int) -> Iterator[Segment]:
    """The parts of the segments that lie in [begin, end)."""
    for one in segments:
        if one.end > begin and one.begin < end:
            yield replace(one, begin=max(one.begin, begin), end=min(one.end, end))


def degraded(
    segments: Iterable[Segment], sizes: Sequence[tuple[int, int, int]]
) -> Iterator[Segment]:
    """Give training with ``n`` of ``m`` ranks the phase ``degraded`` for 1 - n/m of its time.

    ``sizes``: since when (ms), n, m. The two shares of a chunk follow each other.
    """
    sizes = sorted(sizes, key=lambda each: each[0])
    since_when = [since for since, _, _ in sizes]
    for one in segments:
        if not one.productive:
            yield one
            continue
        begin = one.begin
        for at in range(max(0, bisect_right(since_when, begin) - 1), len(sizes)):
            since, now, of = sizes[at]
            if since >= one.end:
                break
            until = sizes[at + 1][0] if at + 1 < len(sizes) else one.end
            first, last = max(begin, since), min(until, one.end)
            if now >= of or last <= first:
                continue
            if first > begin:
                yield replace(one, begin=begin, end=first)
            yield from _shared(replace(one, begin=first, end=last), now, of)
            begin = last
        if begin < one.end:
            yield replace(one, begin=begin)


def _shared(one: Segment, now: int, of: int) -> Iterator[Segment]:
    """The productive and the missing share of a time, chunk by chunk; to the millisecond."""
    count = max(1, min(CHUNKS, one.ms // CHUNK))
    edges = [one.begin + one.ms * n // count for n in range(count + 1)]
    done = 0
    for begin, end in pairwise(edges):
        good = (end - one.begin) * now // of - done
        done += good
        yield replace(one, begin=begin, end=begin + good)
        yield replace(one, begin=begin + good, end=end, phase=DEGRADED, cause="resized")
