"""Judge a replay's groups, and describe the result of all its rounds in words (pure)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from health.active.coordinator.replay import ReplayVerdict, Round, least_chance
from robust_slurm.text import signal_name
from srun_wrapper.job.model import Rank
from srun_wrapper.orders.machine_tests import MachineResults

SHOWN = 8  # nodes that are named one by one

Losses = tuple[tuple[int, str], ...]
"""For each rank that reported a loss: its number, and the loss to the last bit."""


@dataclass(slots=True)
class GroupResult:
    """The result of one group. ``losses``: after exactly the steps asked for, else None."""

    result: Literal["good", "bad", "unknown"]
    why: str = ""
    losses: Losses | None = None


def group_result(
    ranks: Sequence[Rank], steps: int, *, all_beat: bool, nan: bool, sent: Collection[int]
) -> GroupResult | None:
    """Return a group's outcome; None while the group is not over (pure).

    ``all_beat``: every rank reports its steps, not only some; ``nan``: losses that are not finite
    count; ``sent``: signals that somebody sent the ranks.
    """
    for rank in ranks:
        code, signum = rank.exit or (0, 0)
        if signum and signum in sent:
            return GroupResult("unknown", f"{rank.node.name}: ended by {signal_name(signum)}")
        if code or signum:
            how = f"killed by {signal_name(signum)}" if signum else f"exit code {code}"
            return GroupResult("bad", f"{rank.node.name}: {how}")
        bad_loss = rank.loss is not None and not math.isfinite(rank.loss)
        if nan and (bad_loss or rank.nan is not None):
            loss = rank.loss if rank.nan is None else rank.nan.loss
            return GroupResult("bad", f"{rank.node.name}: loss {loss}")
    asked = [rank for rank in ranks if all_beat or rank.beats or rank.exit]
    if not asked or not all(rank.exit or rank.beats >= steps for rank in asked):
        return None
    if not any(rank.beats >= steps for rank in asked) and not all(rank.exit for rank in ranks):
        return None  # the ranks that report steps may still be starting
    told = [(at, rank) for at, rank in enumerate(ranks) if rank.loss is not None]
    losses = tuple((at, float(rank.loss or 0.0).hex()) for at, rank in told)
    exact = told and all(rank.beats == steps for _, rank in told)
    return GroupResult("good", losses=losses if exact else None)


def compare(outcomes: Mapping[int, GroupResult]) -> str:
    """Mark groups with other losses than most as bad; return a note on the comparison."""
    told = {number: o.losses for number, o in outcomes.items() if o.losses is not None}
    missing = sum(o.result == "good" for o in outcomes.values()) - len(told)
    if missing:
        return (
            f"losses of {missing} groups are not compared: their ranks do not report a loss, or "
            f"do not exit after ROBUST_REPLAY_STEPS steps"
        )
    if not told:
        return ""
    common, votes = Counter(told.values()).most_common(1)[0]
    if 2 * votes <= len(told):
        return f"losses are not compared: of {len(told)} groups no more than {votes} agree"
    for number, losses in told.items():
        if losses != common:
            outcomes[number].result = "bad"
            outcomes[number].why = f"its loss differs from that of the {votes} other groups"
    return ""


def read(
    known: ReplayVerdict,
    rounds: Sequence[Round],
    whys: Sequence[Mapping[int, str]],
    names: Sequence[str],
    over: str,
) -> MachineResults:
    """Describe the result. ``names``: of the machines; ``whys``: of each round's groups (pure)."""
    named: dict[str, tuple[str, ...]] = {}
    for x in known.named:
        lines = []
        for number, each in enumerate(rounds):
            for group in each.bad:
                if x in each.groups[group]:
                    others = _list(names[y] for y in each.groups[group] if y != x)
                    beside = f" with {others}" if others else ""
                    lines.append(f"failed in replay {number + 1}{beside}: {whys[number][group]}")
        named[names[x]] = (*lines, "these groups have no other node in common")
    count = f"{len(rounds)} replay{'s' if len(rounds) != 1 else ''}"
    maybe = _list(names[x] for x in known.undecided)
    if named:
        lines = [f"{count}: {','.join(named)} bad", *([f"{maybe} may be, too"] if maybe else [])]
        lines += [f"{name}: {line}" for name, why in named.items() for line in why]
        return MachineResults(named, tuple(lines))
    line = f"{count} named no node: {over}"
    last = rounds[-1] if rounds else None
    if last is not None and len(last.bad | last.unknown) == len(last.groups):
        line += f" ({next(iter(whys[-1].values()))})"
    elif maybe:
        line += f"; it may be {maybe}"
    elif rounds and not any(each.unknown for each in rounds):
        chance = least_chance(len(rounds))
        line += (
            f"; a fault that appears in more than {chance:.0%} of replays would have appeared "
            f"(95 % confidence)"
        )
    return MachineResults({}, (line,))


def _list(names: Iterable[str]) -> str:
    every = list(names)
    return ",".join(every[:SHOWN]) + (",…" if every[SHOWN:] else "")
