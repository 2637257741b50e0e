"""Name the ranks that make a job slow, from looks at all ranks' stacks. Pure.

All ranks of a synchronous training step together: the slow one is the one that does not wait. Looks
come in rounds, as in ByteRobust's fail-slow vote (arXiv 2509.16293, section 5.1). Added here:
outliers are the ranks that are hardly ever in a call that waits for other ranks while most ranks
are in one. The looks at two ranks are not of the same moment, so only shares of many looks count.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from robust_slurm.text import counted
from srun_wrapper.locate.ranks import RankView, nodes_of, numbered
from srun_wrapper.locate.stacks import waits, without_line

ROUNDS = 5
LOOKS = 8  # of a round
WINS = 4  # rounds in which a rank stands out, until it is named
OUTSIDE = 0.75  # share of a round's looks in which such a rank is in no collective
OTHERS = 0.7  # ... while the median share of all ranks is at most this
MARGIN = 0.3  # ... and, over all rounds, at least this much below the rank's own
SURE = 1.5  # standard deviations beyond the largest of so many ranks that are alike
WAITING = 0.2  # all ranks count as waiting if each one's share is at most this
STORED = 0.5  # share of the looks in which ranks wait for one file system, at least
ELSEWHERE = 0.1  # ... and of the looks at the other nodes' ranks, at most
KNOWN = 0.75  # share of the ranks of which a round must know
FRAMES = 3  # that are shown of a rank

Look = Sequence[RankView]
Round = Sequence[Look]
Kind = Literal["ranks", "communication", "all", "unclear", "unknown"]


@dataclass(frozen=True, slots=True)
class Slow:
    """The verdict. ``ranks``: those that stand out; ``nodes``: the nodes that they are on."""

    kind: Kind
    why: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()  # where the first of these ranks is while it waits for nobody
    wins: int = 0
    loads: bool = False  # it is in a data loader
    saves: bool = False  # it is saving a checkpoint
    storage: str = ""  # these ranks wait for a file system, and no other node's do: in words

    @property
    def node(self) -> str:
        """The one node that all ranks that stand out are on; "" if there is none."""
        return self.nodes[0] if len(self.nodes) == 1 else ""

    def record(self) -> dict[str, Any]:
        """Return the fields of the event ``slow``."""
        return {"kind": self.kind, "ranks": self.ranks, "nodes": self.nodes, "why": self.why}


def outside(view: RankView) -> bool | None:
    """True if a rank waits for no other rank; None if that is not known."""
    if view.stack:
        return not waits(view.stack)
    return True if view.state == "D" else None  # it waits for a device or a file


def shares(looks: Round) -> dict[int, float]:
    """Return the share of looks in which each rank was in no collective; ranks known in half."""
    seen: Counter[int] = Counter()
    out: Counter[int] = Counter()
    for look in looks:
        for view in look:
            if (found := outside(view)) is not None:
                seen[view.rank] += 1
                out[view.rank] += found
    return {rank: out[rank] / n for rank, n in seen.items() if 2 * n >= len(looks)}


def vote(found: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks that stand out in a round; () if none do, or most do not wait."""
    if len(found) < 2 or statistics.median_low(found.values()) > OTHERS:
        return ()
    return tuple(sorted(rank for rank, share in found.items() if share >= OUTSIDE))


def margin(typical: float, looks: int, ranks: int) -> float:
    """Return the distance above the typical share that no rank reaches by chance.

    The largest of n normal deviates is about sqrt(2 ln n).
    """
    deviation = math.sqrt(typical * (1.0 - typical) / max(1, looks))
    return max(MARGIN, (math.sqrt(2.0 * math.log(max(1, ranks))) + SURE) * deviation)


def judge(rounds: Sequence[Round], world: int) -> Slow:
    """Judge all rounds; ``world``: the number of ranks."""
    tallies = [shares(looks) for looks in rounds]
    known = [found for found in tallies if len(found) >= max(2, KNOWN * world)]
    if len(known) < WINS:
        failed = next(
            (v.failed for looks in rounds for look in looks for v in look if v.failed), ""
        )
        why = f"the stacks of too few ranks are known{f': {failed}' if failed else ''}"
        return Slow("unknown", why)
    wins = Counter(rank for found in known for rank in vote(found))
    whole = shares([look for looks in rounds for look in looks])
    typical = statistics.median_low(whole.values())
    least = typical + margin(typical, sum(map(len, rounds)), len(whole))
    clear = (r for r, n in wins.items() if n >= WINS and whole.get(r, 0.0) >= least)
    ranks = tuple(sorted(clear))
    if ranks and 2 * len(ranks) <= world:
        return _named(rounds, ranks, whole, min(wins[rank] for rank in ranks))
    if max(whole.values()) <= WAITING:
        why = f"all ranks are in collectives in {_percent(1 - typical)} of the looks: what is slow "
        return Slow("communication", why + "is communication, or hidden in a backward pass")
    if typical > OTHERS:
        why = f"most ranks are outside collectives in {_percent(typical)} of the looks: they are "
        return Slow("all", why + "slow alike, or wait for their devices")
    return Slow("unclear", "no rank stands out in enough rounds")


def _storage(views: Sequence[RankView], slow: Sequence[RankView], nodes: Sequence[str]) -> str:
    """Describe the one file system that the slow ranks wait for, if it is slow on their node."""
    mounts = Counter(view.mount for view in slow if view.mount)
    others = [view.mount for view in views if view.node not in nodes]
    if not mounts or not others or len(nodes) != 1:
        return ""
    ((mount, count),) = mounts.most_common(1)
    own, rest = count / len(slow), others.count(mount) / len(others)
    if own < STORED or rest > ELSEWHERE:
        return ""
    return (
        f"these ranks wait for file system {mount} in {_percent(own)} of the looks, the ranks of "
        f"other nodes in {_percent(rest)}: it is slow on {nodes[0]}, or they alone use it so much"
    )


def _named(
    rounds: Sequence[Round], ranks: tuple[int, ...], whole: Mapping[int, float], wins: int
) -> Slow:
    chosen = set(ranks)
    every = [view for looks in rounds for look in looks for view in look]
    views = [view for view in every if view.rank in chosen]
    nodes = nodes_of(views)
    stacks = Counter(
        tuple(map(without_line, v.stack)) for v in views if v.rank == ranks[0] and outside(v)
    )
    stack = stacks.most_common(1)[0][0] if stacks else ()
    own = statistics.median(whole[rank] for rank in ranks)
    others = [share for rank, share in whole.items() if rank not in chosen]
    of = nodes[0] if len(nodes) == 1 else counted(len(nodes), "node")
    verb = "is" if len(ranks) == 1 else "are"
    why = (
        f"{numbered(ranks)} on {of} {verb} outside collectives in {_percent(own)} of the "
        f"looks, the others in {_percent(statistics.median(others))}"
    )
    return Slow(
        "ranks",
        why,
        ranks,
        nodes,
        stack[:FRAMES],
        wins,
        loads=any(loads(frame) for frame in stack),
        saves=any("checkpoint/" in frame or "serialization.py" in frame for frame in stack),
        storage=_storage(every, views, nodes),
    )


def loads(frame: str) -> bool:
    """True for a frame of torch's data loader or of ours."""
    return any(part in frame for part in ("dataloader.py", "/data/_utils/", "robust_slurm/data/"))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
