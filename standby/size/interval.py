"""The exact confidence interval of a rate from a count of events. Pure.

Garwood's interval (Biometrika 28, 1936): at its lower end this count or more, at its upper end this
count or less, has half of the probability that the interval leaves out. The ends equal half the
chi-square quantiles with 2k and 2k + 2 degrees of freedom, and are found here by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

CONFIDENCE = 0.95
_ENOUGH = 1e-17  # of the first term: smaller terms of a series are left out


def poisson_interval(count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the mean of a Poisson variable that was observed to be ``count``."""
    rare = (1.0 - confidence) / 2.0
    low = _root(lambda mean: at_least(count, mean), 0.0, float(count), rare) if count else 0.0
    high = float(count + 1)
    while at_most(count, high) > rare:
        high *= 2.0
    return low, _root(lambda mean: -at_most(count, mean), float(count), high, -rare)


def at_most(count: int, mean: float) -> float:
    """P(X <= count) for mean >= count: from the term of ``count`` downward, each one smaller."""
    term = total = 1.0
    for k in range(count, 0, -1):
        term *= k / mean
        total += term
        if term < _ENOUGH:
            break
    return total * _term(count, mean)


def at_least(count: int, mean: float) -> float:
    """P(X >= count) for mean <= count: from the term of ``count`` upward, each one smaller."""
    term = total = 1.0
    k = count
    while term >= _ENOUGH:
        k += 1
        term *= mean / k
        total += term
    return total * _term(count, mean)


def _term(count: int, mean: float) -> float:
    """P(X = count)."""
    if mean <= 0.0:
        return 0.0 if count else 1.0
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def _root(rising: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Return the point at which a rising function takes the value ``wanted``."""
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
