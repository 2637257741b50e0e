"""One run of active tests: devices first, all nodes at once, then pairs (asyncio).

A run ends at its time limit, whatever the workers do, and reports the tests that did not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from health.active.coordinator.meeting import Meetings, patience
from health.active.coordinator.session import TestSession
from health.active.coordinator.shares import OVERHEAD_S, ROUNDS, share
from health.active.judging import alignment
from health.active.judging.fleet import NO_BASELINES, Baselines, limit
from health.active.judging.judge import judge
from health.active.judging.pairing import STANDARD, Pairing, Pairings, PairKind, PairVerdict
from health.active_tests import BY_NAME, Judged, Level, Measured
from health.finding import Finding
from robust_slurm.text import counted

LAST_S = 0.2  # of the limit, for the judgement
COMPARABLE = 3  # machines from which on comparing bits shows which one is wrong


class WantedTests(NamedTuple):
    """The tests to run, and the seconds that they may take (``limit``)."""

    tests: tuple[str, ...]
    level: Level
    limit: float
    suspects: tuple[str, ...] = ()
    leaf_of: Mapping[str, str] = {}
    seed: int = 0


class Measurements(NamedTuple):
    """The results of a run before judgement: the arguments of ``judge.judge``.

    ``devices``: how many the workers had, by node.
    """

    measured: tuple[Measured, ...]
    pairs: PairVerdict | None
    asked: dict[str, frozenset[str]]
    seconds: float
    left_out: tuple[str, ...]
    more: Mapping[str, tuple[Finding, ...]] = {}
    devices: Mapping[str, int] = {}


async def run(
    session: TestSession,
    nodes: Sequence[str],
    wanted: WantedTests,
    *,
    baselines: Baselines = NO_BASELINES,
    said: Callable[[str], None] = lambda line: None,
) -> Judged:
    """Test the nodes whose workers the session has gathered, and judge by the published floors."""
    found = await Procedure(session, nodes, wanted, baselines, said).measure()
    return judge(baselines=baselines, **found._asdict())


class Procedure:
    """The tests of the nodes whose workers the session has gathered.

    ``baselines``: the fleet's record; ``said`` gets a line for each stage. Takes at most
    ``wanted.limit`` seconds. KeyError for an unknown test.
    """

    def __init__(
        self,
        session: TestSession,
        nodes: Sequence[str],
        wanted: WantedTests,
        baselines: Baselines,
        said: Callable[[str], None],
    ) -> None:
        self._session = session
        self._nodes = list(dict.fromkeys(nodes))
        self._wanted = wanted
        self._baselines = baselines
        self._said = said
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._until = self._began + max(0.0, wanted.limit - LAST_S)
        self._measured: list[Measured] = []
        self._left_out: list[str] = []
        self._able = [node for node in self._nodes if session.ready(node)]
        self._devices_of = {node: self._device_names(node) for node in self._able}
        self._with_gpu = {node for node, found in self._devices_of.items() if found - {"cpu"}}
        self._not_begun: dict[str, set[str]] = {}  # by test: nodes that had no time for it
        self._unpaired: set[str] = set()  # able, and not meant to take part in pairs
        self._shares = self._divide()

    async def measure(self) -> Measurements:
        """Run the tests, without the judgement."""
        for node in self._nodes:
            for why in self._session.missing(node):
                self._measured.append(Measured("worker", node, error=why))
        await self._devices()
        verdict = await self._pairs()
        asked = {node: self._asked(node) for node in self._able}
        for node in self._unpaired:
            asked[node] -= {"pair"}
        for name, nodes in self._not_begun.items():
            self._left_out.append(
                f"{name}: not started on {counted(len(nodes), 'node')} ({_some(nodes)}): "
                f"{self._wanted.limit:g} s had passed"
            )
            for node in nodes:
                asked[node] -= {name}
        return Measurements(
            tuple(self._measured),
            verdict,
            asked,
            self._clock() - self._began,
            tuple(self._left_out),
            {},
            {node: len(found) for node, found in self._devices_of.items()},
        )

    def _divide(self) -> dict[str, float]:
        """Return the seconds of each test that will run; list the others with the reason."""
        wanted = dict.fromkeys(self._wanted.tests)
        for name in wanted.copy():
            needs = BY_NAME[name].needs
            if "cuda" in needs and self._able and not self._with_gpu:
                self._left_out.append(f"{name}: no node has a GPU that torch can use")
                del wanted[name]
            elif "peer" in needs and len(self._able) < 2:
                self._left_out.append(f"{name}: needs two nodes that can be tested")
                del wanted[name]
        shares = share(wanted, self._wanted.level, self._until - self._began)
        self._left_out += shares.left_out
        few = 0 < len(self._able) < COMPARABLE and not self._baselines.digests
        if "bitwise" in shares.seconds and few:
            self._left_out.append(
                f"bitwise between machines: {len(self._able)} of them and no recorded reference "
                f"cannot show which one is wrong; {COMPARABLE} machines can"
            )
        return shares.seconds

    def _device_names(self, node: str) -> set[str]:
        """The devices that the node's workers have."""
        locals_ = self._session.ready(node)
        return {name for local in locals_ for name in self._session.about(node, local).devices}

    def _asked(self, node: str) -> frozenset[str]:
        """The tests that are to run there."""
        gpu = node in self._with_gpu
        return frozenset(name for name in self._shares if gpu or "cuda" not in BY_NAME[name].needs)

    # -- on the devices of each node

    async def _devices(self) -> None:
        order = [name for name in self._shares if BY_NAME[name].scope in ("device", "node")]
        if not order or not self._able:
            return
        self._said(f"{', '.join(order)} on {counted(len(self._able), 'node')}")
        places = [(node, n) for node in self._able for n in self._session.ready(node)]
        await asyncio.gather(*(self._chain(node, local, order) for node, local in places))

    async def _chain(self, node: str, local: int, order: Sequence[str]) -> None:
        """Run a worker's tests in turn, until it leaves one unanswered or the time is over."""
        until = self._until
        if "pair" in self._shares:
            until -= ROUNDS * (self._shares["pair"] + OVERHEAD_S)
        asked = [name for name in order if name in self._asked(node)]
        for number, name in enumerate(asked):
            seconds, left = self._shares[name], until - self._clock()
            if left < BY_NAME[name].seconds["quick"]:
                self._not_begun.setdefault(name, set()).add(node)
                continue
            wait = min(left, patience(seconds, left, len(asked) - number))
            task = self._task(name, min(seconds, left)) | {"wait": round(wait, 3)}
            self._measured += await self._session.ask(node, task, wait, local)
            if not self._session.idle(node, local):
                return

    def _task(self, name: str, seconds: float) -> dict[str, Any]:
        return {
            "test": name,
            "level": self._wanted.level,
            "seconds": round(seconds, 3),
            "seed": self._wanted.seed,
        }

    # -- between nodes

    async def _pairs(self) -> PairVerdict | None:
        if "pair" not in self._shares:
            return None
        seconds = self._shares["pair"]
        bad, undecided = self._proven()
        self._unpaired = bad & set(self._able)
        able = [node for node in self._able if self._session.idle(node) and node not in bad]
        suspects = [n for n in able if n in self._wanted.suspects or n in undecided]
        groups: dict[PairKind, list[str]] = {}
        for node in able:
            groups.setdefault(self._kind(node), []).append(node)
        for kind, nodes in groups.items():
            if len(nodes) == 1 < len(groups):
                self._left_out.append(f"pair: {nodes[0]} is the only node with {kind}")
        groups = {kind: nodes for kind, nodes in groups.items() if len(nodes) > 1}
        groups = self._those_that_fit(groups, suspects, seconds)
        if not groups:
            self._left_out.append("pair: fewer than two testable nodes are left")
        self._unpaired |= set(able).difference(*groups.values())
        if not groups:
            return None
        pairing = Pairings([self._pairing(kind, nodes, suspects) for kind, nodes in groups.items()])
        meetings = Meetings(self._session, self._task("pair", seconds), self._until)
        done = 0
        while pairs := pairing.next_round():
            if self._clock() + seconds + OVERHEAD_S > self._until:
                self._left_out.append(
                    f"pair: no time for round {done + 1}; the verdict uses the first {done}"
                )
                break
            done += 1
            self._said(f"round {done}: {counted(len(pairs), 'pair')}")
            pairing.record(await asyncio.gather(*(meetings.meet(pair) for pair in pairs)))
        self._measured += meetings.measured
        return pairing.verdict()

    def _proven(self) -> tuple[set[str], set[str]]:
        """Nodes with proven wrong arithmetic, and nodes that disagree without such proof."""
        aligned = alignment.deviants(self._measured, self._baselines.digests)
        wrong = {m.node for m in self._measured if m.wrong}
        return wrong | set(aligned.named), set(aligned.undecided)

    def _those_that_fit(
        self, groups: dict[PairKind, list[str]], suspects: list[str], seconds: float
    ) -> dict[PairKind, list[str]]:
        """Return all nodes, or the suspects and as many others if the time is too short."""
        if not suspects or self._clock() + ROUNDS * (seconds + OVERHEAD_S) <= self._until:
            return groups
        chosen: dict[PairKind, list[str]] = {}
        others = 0
        for kind, nodes in groups.items():
            mine = [node for node in nodes if node in suspects]
            rest = [node for node in nodes if node not in suspects][: max(2, len(mine))]
            if mine and len(mine) + len(rest) > 1:
                chosen[kind] = mine + rest
                others += len(rest)
        if sum(map(len, chosen.values())) < sum(map(len, groups.values())):
            self._left_out.append(
                f"pair: no time for all; only the suspects and {counted(others, 'other')} were "
                "tested"
            )
        return chosen

    def _kind(self, node: str) -> PairKind:
        about = self._session.about(node)
        return PairKind(about.backend, tuple(sorted(set(about.models))), len(about.devices))

    def _pairing(self, kind: PairKind, nodes: Sequence[str], suspects: Sequence[str]) -> Pairing:
        return Pairing(
            nodes,
            suspects=suspects,
            leaf_of=self._wanted.leaf_of,
            floor_gbps=_floor_gbps(kind, len(nodes), self._baselines),
            share=kind.share,
            seed=self._wanted.seed,
        )


def _floor_gbps(kind: PairKind, nodes: int, baselines: Baselines) -> float | None:
    """The bandwidth in GB/s below which a pair is slow, from the fleet's results. None where the
    run's own pairs are enough for a standard, where others share the cores, or results are few."""
    if nodes >= 2 * STANDARD or kind.backend != "nccl":
        return None
    known = [
        baselines.usual(Measured("pair", "", model=model), "busbw_gbps", kind.devices)
        for model in kind.models
    ]
    least = [limit(spread) if spread else None for spread in known]
    return min(value for value in least if value) if least and all(least) else None


def _some(nodes: Iterable[str]) -> str:
    """The first few."""
    names = sorted(nodes)
    return ",".join([*names[:4], *(["…"] if len(names) > 4 else [])])
