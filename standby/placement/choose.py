"""The choice of a standby for each lost node's place. Pure.

The choice has the smallest weighted maximum spread of the job's groups (``spread``); among equals,
the smallest total spread; among those, it is the first by name, place by place. Candidates of one
minipod differ in their names only, so the search is over minipods. It
is exhaustive (branch and bound) within a budget that a few lost nodes never reach; beyond it the
answer is a greedy choice improved by exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from standby.placement.spread import ALPHA, Layout, check_alpha, groups
from standby.placement.vacancies import Score, Vacancies

UNKNOWN = "?"
"""The one minipod of all nodes that the topology does not list."""

_BUDGET = 5_000  # times that a minipod is tried for a place; about 0.1 s
_ROUNDS = 20  # of exchanges; each makes the score smaller


def choose(
    lost: Sequence[str],
    candidates: Sequence[str],
    places: Sequence[str],
    mesh: Mapping[str, int],
    ranks_per_node: Layout,
    switches: Mapping[str, str],
    alpha: float = ALPHA,
) -> dict[str, str]:
    """Return, for each lost node, the standby node that takes its ranks.

    ``places``: the job's nodes in rank order, the lost ones included. ``mesh``, ``ranks_per_node``:
    see ``spread.groups``. ``switches``: node → minipod (``topology.minipods``); with {} (nothing is
    known), the first candidates by name are chosen. Candidates that are already in the job are
    skipped. Raises ValueError for a lost node without a place, and where ``groups`` does.
    """
    check_alpha(alpha)
    at = {node: number for number, node in enumerate(places)}
    if len(at) != len(places):
        raise ValueError(f"{len(places)} places, but only {len(at)} different nodes")
    if strangers := [node for node in lost if node not in at]:
        raise ValueError(f"lost nodes that are not in the job: {', '.join(strangers)}")
    empty = sorted({at[node] for node in lost})
    pools: dict[str, list[str]] = {}
    for name in sorted(set(candidates) - set(places)):
        pools.setdefault(switches.get(name, UNKNOWN), []).append(name)
    minipod = [switches.get(node, UNKNOWN) for node in places]
    job = groups(mesh, ranks_per_node, len(places))
    search = _Search(Vacancies(job, minipod, empty, alpha), empty, pools)
    search.run()
    names = {pod: iter(of_pod) for pod, of_pod in pools.items()}
    return {
        places[place]: next(names[pod])
        for place, pod in zip(empty, search.chosen, strict=True)
        if pod is not None
    }


class _Search:
    """Fills the empty places of ``job``: a minipod for each, None where candidates ran out."""

    def __init__(
        self, job: Vacancies, empty: Sequence[int], pools: Mapping[str, Sequence[str]]
    ) -> None:
        self.job = job
        self.chosen: list[str | None] = [None] * len(empty)
        self._empty = empty
        self._pools = pools
        self._used = dict.fromkeys(pools, 0)
        self._short = max(0, len(empty) - sum(map(len, pools.values())))
        self._tried = 0
        self._best: Score = (0.0, 0)
        self._found: list[str | None] | None = None

    def run(self) -> None:
        self._greedy()
        self._best, first = self.job.score, list(self.chosen)
        self._set(dict.fromkeys(range(len(first))))
        self._exhaust(0, self._short)
        self._set(dict(enumerate(self._found or first)))
        if self._tried > _BUDGET:
            self._exchange()

    def _greedy(self) -> None:
        """Fill the cheapest place first, again and again."""
        for _ in range(len(self._empty) - self._short):
            _, index, _, pod = min(
                (self.job.tried(self._empty[index], pod), index, self._next(pod), pod)
                for index, now in enumerate(self.chosen)
                if now is None
                for pod in self._open()
            )
            self._set({index: pod})

    def _exhaust(self, index: int, short: int) -> None:
        """Branch and bound over the places from ``index`` on, ``short`` of which stay empty."""
        if index == len(self._empty):
            self._best, self._found = self.job.score, list(self.chosen)
            return
        branches: list[str | None] = [*sorted(self._open(), key=self._next)]
        if short:
            branches.append(None)
        for pod in branches:
            self._tried += 1
            if self._tried > _BUDGET:
                return
            self._set({index: pod})
            # An equal score is accepted for the first solution only: it is the first by name.
            now = self.job.score
            if now < self._best or (now == self._best and self._found is None):
                self._exhaust(index + 1, short - (pod is None))
            self._set({index: None})

    def _exchange(self) -> None:
        """Change a place's minipod, or swap those of two places, while the score improves."""
        for _ in range(_ROUNDS):
            start = self.job.score
            for index in range(len(self.chosen)):
                for pod in self._open():
                    self._keep_if_better({index: pod})
            for a, b in combinations(range(len(self.chosen)), 2):
                self._keep_if_better({a: self.chosen[b], b: self.chosen[a]})
            if self.job.score == start:
                return

    def _keep_if_better(self, change: Mapping[int, str | None]) -> None:
        before, old = self.job.score, {index: self.chosen[index] for index in change}
        if None in old.values() or old == change:
            return
        self._set(change)
        if self.job.score >= before:
            self._set(old)

    def _set(self, change: Mapping[int, str | None]) -> None:
        for index in change:
            if (old := self.chosen[index]) is not None:
                self.job.clear(self._empty[index], old)
                self._used[old] -= 1
        for index, pod in change.items():
            self.chosen[index] = pod
            if pod is not None:
                self.job.fill(self._empty[index], pod)
                self._used[pod] += 1

    def _open(self) -> list[str]:
        """Minipods that have a candidate left."""
        return [pod for pod, names in self._pools.items() if self._used[pod] < len(names)]

    def _next(self, pod: str) -> str:
        """Return the minipod's next unused candidate."""
        return self._pools[pod][self._used[pod]]
