"""One pair of nodes at its test: who listens, what both are told, what their answers come to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from health.active.model import Measured
from health.active.pairing import Pair, PairResult
from health.active.session import Session, WorkerError

LISTEN_S = 5.0
GRACE_S = 10.0
# One all-reduce: large enough for the bandwidth, small enough to end on a link that is cut.
BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}


def patience(seconds: float) -> float:
    """How long a test of so many seconds is waited for: slow ones, and first use of a device."""
    return 2 * seconds + GRACE_S


class Meetings:
    """Runs pairs until ``until`` (of the loop's clock). ``measured``: what their sides answered.

    ``task``: what is the same for all pairs.
    """

    def __init__(self, session: Session, task: Mapping[str, Any], until: float) -> None:
        self._session = session
        self._task = task
        self._until = until
        self._clock = asyncio.get_running_loop().time
        self.measured: list[Measured] = []

    async def meet(self, pair: Pair) -> PairResult:
        """What one side could not do is an error of the pair, with the texts of both."""
        first, second = pair
        if _loopback(self._session.about(first).host):  # where the other one could not reach it
            first, second = second, first
        try:
            answer = await self._session.request(
                first, {"test": "listen"}, min(self._left(), LISTEN_S)
            )
        except WorkerError as err:
            return self._failed(pair, f"{first}: {err}")
        port, about = answer.get("port"), self._session.about(first)
        if not isinstance(port, int):
            return self._failed(pair, f"{first}: it cannot listen: {str(answer)[:200]}")
        task = {
            **self._task,
            "host": about.host,
            "port": port,
            "world": 2,
            "peers": [first, second],
            "bytes": BYTES.get(about.backend, BYTES["gloo"]),
        }
        wait = min(self._left(), patience(float(self._task["seconds"])))
        sides = await asyncio.gather(
            self._session.ask(first, task | {"rank": 0}, wait),
            self._session.ask(second, task | {"rank": 1}, wait),
        )
        found = [one._replace(peers=(first, second)) for side in sides for one in side]
        self.measured += found
        return result(pair, found)

    def _left(self) -> float:
        return max(0.0, self._until - self._clock())

    def _failed(self, pair: Pair, error: str) -> PairResult:
        self.measured += [Measured("pair", node, error=error, peers=tuple(pair)) for node in pair]
        return PairResult(pair.one, pair.other, None, False, error)


def result(pair: Pair, found: Sequence[Measured]) -> PairResult:
    """What the two sides saw, as one: the slower one's bandwidth, and either one's trouble."""
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
