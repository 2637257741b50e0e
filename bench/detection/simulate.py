"""Walks through what robust-srun sees of each stumble, with the product's own verdict on it.

Times are seconds around the moment 0 at which something begins. What decides is the product's:
``unreachable.judge`` and ``SilencePatience``, the limits of ``suspects`` and of ``node_watch``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from srun_wrapper.agent.connections.signs import EVERY as WITNESS_EVERY
from srun_wrapper.detect import node_watch, suspects
from srun_wrapper.detect.guard import TICK
from srun_wrapper.detect.unreachable import OverdueNode, SilencePatience, judge

RTT = 0.001  # s of a network's round trip
RETRIES = (0.2, 0.6, 1.4, 3.0, 6.2)  # s after the first attempt, of TCP
NEVER = 1e9


@dataclass(frozen=True, slots=True)
class Stumble:
    """A thing that happens at 0, for so long; NEVER: the node crashes."""

    what: str
    length: float
    loss: float = 0.15  # of packets, where ``what`` is "packets"


class Seen(NamedTuple):
    """The times at which each rule gives the node up (NEVER: it does not), and of its next word."""

    before: float
    now: float
    word: float


class _Walk:
    """One stumble of one node, which gives a sign of life every ``interval`` s."""

    def __init__(self, stumble: Stumble, interval: float, random_: random.Random) -> None:
        self.stumble = stumble
        self.interval = interval
        self.random = random_
        self.last = -random_.random() * interval  # the last word
        self.due = self.last + interval
        self.tick = max(suspects.LOOKS_LEAST, suspects.LOOKS * interval)
        self.phase = random_.random()

    def answers(self, at: float) -> bool:
        """Return whether the node's kernel answers an attempt that begins then."""
        what, length = self.stumble.what, self.stumble.length
        if what == "packets":
            if not 0 <= at < length:
                return True
            lost = self.stumble.loss
            return self.random.random() > lost and self.random.random() > lost
        return what in ("process", "supervisor") or not 0 <= at < length

    def word(self) -> float:
        """Return when its next sign of life comes through."""
        what, length = self.stumble.what, self.stumble.length
        if what in ("process", "machine"):
            return max(self.due, length)
        if what == "supervisor":
            return max(self.due, length) if self.due >= 0 else self.due
        for wait in (0.0, *RETRIES):
            if self.answers(self.due + wait):
                return self.due + wait + RTT
        return NEVER if length >= NEVER else max(self.due, length) + 1.0

    def held_up(self) -> bool:
        """Return whether robust-srun notices that it stood still itself."""
        return self.stumble.what == "supervisor" and self.stumble.length > suspects.HELD_UP


def _look(after: float, tick: float, phase: float) -> float:
    """The first look after a moment."""
    return after + tick - (after + phase * tick) % tick


class Signs(NamedTuple):
    """Seconds between two signs of life of a node."""

    report: float
    pulse: float  # of reports only: the same


def walk(stumble: Stumble, signs: Signs, patience: SilencePatience, random_: random.Random) -> Seen:
    """Return what becomes of one node. ``patience`` learns from it."""
    old, one = (_Walk(stumble, each, random_) for each in signs)
    before = _before(old, old.word(), signs.report)
    word = one.word()
    return Seen(before, min(_before(one, word, signs.report), _now(one, word, patience)), word)


def _before(one: _Walk, word: float, report: float) -> float:
    """Decide by silence alone, after six attempts, as it does still."""
    late = report + max(node_watch.LATE, 0.5 * report)
    asked = _look(one.last + late, TICK, one.phase)
    if word <= asked:
        return NEVER
    if one.stumble.what == "supervisor":
        return NEVER  # it reads what has come before it judges
    attempts = [asked, *(asked + wait for wait in node_watch.PROBED_AGAIN)]
    end = asked + node_watch.PROBE_TIMEOUT
    return NEVER if word <= end or any(map(one.answers, attempts)) else end


def _now(one: _Walk, word: float, patience: SilencePatience) -> float:
    """Decide by what several see."""
    asked = _look(one.due + suspects.late(one.interval), one.tick, one.phase)
    if word <= asked or one.held_up() or one.answers(asked):
        return NEVER
    if patience.off:
        return NEVER
    end = one.due + patience.limit(0.0)
    order = asked + suspects.UNANSWERED
    direct = _first(one, asked, end, suspects.EVERY)
    if direct <= order:
        return NEVER
    said = [order + RTT * (1 + number / 3) for number in range(3)]
    reached = [_first(one, began, end + RTT, WITNESS_EVERY) for began in said]
    group = one.stumble.what == "group"
    soonest = min(word, direct, *reached)
    if soonest < NEVER and soonest <= end + 2 * RTT:
        _learn(one, soonest, patience)
        return NEVER
    tries = int((end - order) / WITNESS_EVERY)
    unheard = 1 if group and not one.answers(order) else 0
    seen = OverdueNode(end, 3, (tries,) * 3, unheard=unheard)
    if judge(seen, end + 2 * RTT) == "lost":
        return end + 2 * RTT + suspects.LOOK
    if word < end + suspects.LEFT:
        _learn(one, word, patience)
    return NEVER


def _learn(one: _Walk, ended: float, patience: SilencePatience) -> None:
    patience.note(ended - one.last, 0.0)


def _first(one: _Walk, began: float, end: float, every: float) -> float:
    """Return when the first of the attempts is answered; NEVER: none is."""
    at = began
    while at < end:
        if one.answers(at):
            return at + RTT
        at += every
    return NEVER
