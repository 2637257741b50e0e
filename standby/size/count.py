"""The number of standbys, by the distribution of nodes lost while the pool is refilled. Pure.

ByteRobust's rule (arXiv 2509.16293, warm standbys): nodes fail one by one and independently with
probability p a day, so K of N nodes fail at once with K ~ Binomial(N, p); the pool is the smallest
n with P(K <= n) >= 0.99. That is one source of losses here, of size 1, over a window of one day.

Two things are added:

- Other sources, in which several nodes leave at once: a whole parallel group is evicted because
  nobody knows which of its machines is bad, a switch takes all nodes below it. N nodes are
  N // size units of that size (and one of the remainder); each unit goes with a probability of
  its own, independently. K is the sum over all sources.
- The window. What a pool must bridge is the time until a used standby is replaced by another one.
  With one replacement ordered per loss, the number that is out at any moment is distributed as
  the losses of one refill time, and only the mean refill time matters: Palm's theorem, for
  losses in groups by Feeney and Sherbrooke, "The (s-1, s) inventory policy under compound Poisson
  demand" (RAND RM-4176, 1966). So p = rate x size x refill time, which has no unit, instead of
  the rate of a day. The distribution is binomial, as in ByteRobust's paper, and not Poisson: for
  small p they are the same. A unit counts once per window, so above UNSURE the result is too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_NODES = 100_000
UNSURE = 0.1  # p from which on a unit that goes twice within the window is no rarity
_NEGLIGIBLE = 1e-30  # of the most probable value: where a distribution is cut off


class SizeError(ValueError):
    """Numbers from which no pool size can be computed; the text says what is wrong."""


class LossSource(NamedTuple):
    """One way to lose nodes. ``rate``: events per node-day; each takes ``size`` nodes."""

    size: int
    rate: float


class Distribution(NamedTuple):
    """P(K = first + i) is pmf[i]; what is outside is less than 1e-28."""

    first: int
    pmf: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(k * p for k, p in enumerate(self.pmf, self.first))

    def at(self, k: int) -> float:
        """P(K = k)."""
        return self.pmf[k - self.first] if 0 <= k - self.first < len(self.pmf) else 0.0

    def smallest(self, quantile: float) -> int:
        """The smallest n with P(K <= n) >= quantile."""
        tail = 0.0
        for k in range(self.first + len(self.pmf) - 1, self.first, -1):
            tail += self.at(k)  # from the small terms to the large ones
            if tail > 1.0 - quantile:
                return k
        return self.first


def binomial(trials: int, p: float) -> Distribution:
    """Binomial(trials, p), from its mode outward by the ratio of neighbours, then normalized.

    Nothing under- or overflows: the mode has weight 1 and all others are smaller.
    """
    if p <= 0.0 or p >= 1.0:
        return Distribution(trials if p >= 1.0 else 0, (1.0,))
    odds = p / (1.0 - p)
    mode = min(trials, math.floor((trials + 1) * p))
    up = [1.0]
    for k in range(mode, trials):
        if up[-1] < _NEGLIGIBLE:
            break
        up.append(up[-1] * odds * (trials - k) / (k + 1))
    down = [1.0]
    for k in range(mode, 0, -1):
        if down[-1] < _NEGLIGIBLE:
            break
        down.append(down[-1] * k / (odds * (trials - k + 1)))
    weights = [*reversed(down[1:]), *up]
    total = math.fsum(weights)
    return Distribution(mode - len(down) + 1, tuple(w / total for w in weights))


def plus(one: Distribution, other: Distribution, size: int = 1) -> Distribution:
    """The distribution of K + size x L, K and L independent: an exact convolution."""
    out = [0.0] * (len(one.pmf) + (len(other.pmf) - 1) * size)
    for j, q in enumerate(other.pmf):
        begin = j * size
        for i, p in enumerate(one.pmf, begin):
            out[i] += p * q
    return Distribution(one.first + other.first * size, tuple(out))


def units(nodes: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (count, size) of the units that N nodes are divided into, the remainder last."""
    whole, rest = divmod(nodes, size)
    return tuple((n, s) for n, s in ((whole, size), (1 if rest else 0, rest)) if n)


def probability(source: LossSource, days: float, size: int | None = None) -> float:
    """Return the probability that a unit is lost within ``days`` days. Raises SizeError above 1."""
    p = source.rate * (size or source.size) * days
    if p > 1.0:
        what = "a node" if source.size == 1 else f"every group of {source.size} nodes"
        raise SizeError(
            f"{1000 * source.rate:g} events per 1,000 node-days take {what} {p:.3g} times within "
            f"a refill time of {24 * days:g} h: no pool covers that; are the units right?"
        )
    return p


def losses(nodes: int, sources: Sequence[LossSource], days: float = 1.0) -> Distribution:
    """Return how many of ``nodes`` are lost within ``days`` days. Raises SizeError."""
    if not 1 <= nodes <= MAX_NODES:
        raise SizeError(f"{nodes} nodes: 1 to {MAX_NODES:,} can be computed")
    if not 0.0 < days < math.inf:
        raise SizeError(f"a refill time of {24 * days:g} h: it must be above 0")
    total = Distribution(0, (1.0,))
    for source in sources:
        if source.size < 1 or not 0.0 <= source.rate < math.inf:
            raise SizeError(f"groups of {source.size} nodes at {source.rate:g} per node-day")
        for count, size in units(nodes, source.size):
            total = plus(total, binomial(count, probability(source, days, size)), size)
    return total


def pool(lost: Distribution, quantile: float = 0.99) -> int:
    """The smallest pool with P(K <= n) >= quantile. Raises SizeError."""
    if not 0.0 < quantile < 1.0:
        raise SizeError(f"quantile {quantile:g}: it must be above 0 and below 1, like 0.99")
    return lost.smallest(quantile)
