"""Real workers with torch, two on this machine: what the fakes of the other tests stand for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from health.active import start
from health.active.model import Judged
from health.active.procedure import Wanted, run
from health.active.session import Session

pytest.importorskip("torch")
NODES = ("n1", "n2")


def judged_of(*tests: str) -> Judged:
    async def body() -> Judged:
        session = Session(dict.fromkeys(NODES, 1))
        await session.open("127.0.0.1")
        workers = [start.here(session, node, sys.executable) for node in NODES]
        try:
            await session.gather(120)
            assert not [why for node in NODES for why in session.missing(node)]
            return await run(session, NODES, Wanted(tests, "quick", 60, seed=3))
        finally:
            await session.close()
            for worker in workers:
                await worker.stop()

    return asyncio.run(body())


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.timeout(300)
def test_two_workers_agree_and_reach_each_other() -> None:
    before = open_files()
    judged = judged_of("bitwise", "pair")
    assert judged.cleared == set(NODES), (judged.findings, judged.left_out)
    digests = [m.digests for m in judged.measured if m.test == "bitwise"]
    assert len(digests) == 2 and digests[0] == digests[1] and len(digests[0]) == 2
    speeds = [m.values["busbw_gbps"] for m in judged.measured if m.test == "pair"]
    assert len(speeds) == 2 and min(speeds) > 0
    assert open_files() <= before
