"""Tests of several nodes together: choose who listens, send the tasks, merge the answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from health.active.coordinator.session import TestSession, WorkerError
from health.active.judging.pairing import Pair, PairResult
from health.active_tests import Measured

LISTEN_S = 5.0
GRACE_S = 10.0
MOST_TIMES = 4
# One all-reduce: large enough for the bandwidth, small enough to end on a link that is cut.
BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}


def patience(seconds: float, left: float = 0.0, tests: int = 1) -> float:
    """The seconds to wait for a test: room for slow nodes and for a device's first use.

    Longer, up to ``MOST_TIMES`` that, where ``left`` seconds for so many tests are enough for it:
    the node may be busy.
    """
    usual = 2 * seconds + GRACE_S
    return max(usual, min(left / (tests + 1), MOST_TIMES * usual))


class Meetings:
    """Runs pairs until ``until`` (by the loop's clock).

    ``measured``: the answers so far. ``task``: the fields that all requests share.
    """

    def __init__(self, session: TestSession, task: Mapping[str, Any], until: float) -> None:
        self._session = session
        self._task = task
        self._until = until
        self._clock = asyncio.get_running_loop().time
        self.measured: list[Measured] = []

    async def meet(self, pair: Pair) -> PairResult:
        """Test a pair. A side that fails makes it an error of the pair, with the texts of both."""
        return result(pair, await self.together(pair))

    async def together(self, nodes: Sequence[str]) -> list[Measured]:
        """Measure these nodes together. Ranks are in this order, but the listener is rank 0."""
        reachable = (n for n in nodes if not _loopback(self._session.about(n).host))
        first = next(reachable, nodes[0])
        ranks = [first, *(node for node in nodes if node != first)]
        found = await self._ask(ranks)
        found = [one._replace(peers=tuple(ranks)) for one in found]
        self.measured += found
        return found

    async def _ask(self, ranks: Sequence[str]) -> list[Measured]:
        first = ranks[0]
        try:
            answer = await self._session.request(
                first, {"test": "listen"}, min(self._left(), LISTEN_S)
            )
        except WorkerError as err:
            return self._failed(ranks, f"{first} cannot listen: {err}")
        port, about = answer.get("port"), self._session.about(first)
        if not isinstance(port, int):
            return self._failed(ranks, f"{first} cannot listen: {str(answer)[:200]}")
        task = {
            **self._task,
            "host": about.host,
            "port": port,
            "world": len(ranks),
            "peers": list(ranks),
            "bytes": BYTES["nccl" if about.backend == "nccl" else "gloo"],
            "secret": os.urandom(16).hex(),  # sealed.py: their store is open to everybody
        }
        wait = min(self._left(), patience(float(self._task["seconds"])))
        asks = (
            self._session.ask(node, task | {"rank": rank}, wait) for rank, node in enumerate(ranks)
        )
        return [one for side in await asyncio.gather(*asks) for one in side]

    def _left(self) -> float:
        return max(0.0, self._until - self._clock())

    def _failed(self, ranks: Sequence[str], error: str) -> list[Measured]:
        return [Measured(str(self._task["test"]), node, error=error) for node in ranks]


def result(pair: Pair, found: Sequence[Measured]) -> PairResult:
    """Merge the two sides' answers: the slower side's bandwidth, and the errors of either side."""
    speeds = [one.values["busbw_gbps"] for one in found if "busbw_gbps" in one.values]
    error = "; ".join(f"{one.node}: {one.error}" for one in found if one.error)
    wrong = [f"{one.node}: {line}" for one in found for line in one.wrong]
    if not speeds and not error and not wrong:
        error = f"{pair.one}, {pair.other}: no bandwidth in their answers"
    return PairResult(
        pair.one,
        pair.other,
        min(speeds) if speeds and not error else None,
        bool(wrong),
        error,
        "; ".join(wrong),
    )


def _loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
