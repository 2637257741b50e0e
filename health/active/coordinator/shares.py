"""Division of the available time between the requested tests. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from health.active_tests import BY_NAME, TESTS, Level

OVERHEAD_S = 1.0  # of a test beyond its seconds: request, preparation, answer
ROUNDS = 3  # of pairs: all, then the suspects with proven nodes, then the odd one out
# By worth: the last one is left out first. Nothing else shows wrong bits, and a pair is the only
# test of the network between two nodes.
_WORTH = ("bitwise", "gemm", "pair", "memory", "local", "links")


class Shares(NamedTuple):
    """Seconds of each test, in the order in which they run; and what does not fit, a line each."""

    seconds: dict[str, float]
    left_out: tuple[str, ...]


def rounds(test: str) -> int:
    """The number of times that the test's seconds are needed."""
    return ROUNDS if BY_NAME[test].scope == "pair" else 1


def share(wanted: Iterable[str], level: Level, limit: float) -> Shares:
    """Every test gets at least what "quick" gives it and at most what the level does.

    What does not fit into ``limit`` seconds is left out; what lies between is divided in
    proportion. KeyError for an unknown test.
    """
    names = set(wanted)
    for name in names - set(BY_NAME):
        raise KeyError(name)
    least, left_out = dict[str, float](), dict[str, str]()
    free = limit
    for name in sorted(names, key=_WORTH.index):
        seconds = BY_NAME[name].seconds["quick"]
        cost = rounds(name) * (seconds + OVERHEAD_S)
        if cost <= free:
            least[name] = seconds
            free -= cost
        else:
            left_out[name] = (
                f"{name}: needs {cost:g} s, and of {limit:g} s {max(0.0, free):g} are left"
            )
    more = {name: BY_NAME[name].seconds[level] - least[name] for name in least}
    wish = sum(rounds(name) * seconds for name, seconds in more.items())
    part = min(1.0, free / wish) if wish > 0 else 0.0
    order = [test.name for test in TESTS]
    return Shares(
        {name: least[name] + part * more[name] for name in order if name in least},
        tuple(left_out[name] for name in order if name in left_out),
    )
