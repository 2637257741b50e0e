"""A job's time as segments without gap or overlap, in whole milliseconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

TRAINING = "training"
INCIDENT_PHASES = ("detect", "decide", "stop", "test", "replace", "restore", "launch", "first_step")
REDONE = "redone"
PHASES = (TRAINING, "queued", "script", "start_up", *INCIDENT_PHASES, REDONE, "check", "ending")
"""All phases. queued: the job waits in Slurm after a requeue; script: it runs, robust-srun does
not; start_up: until the first step; redone: steps that were done before; check: steps that are
computed again on other nodes; ending: after an incident that ended the run."""


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
