"""Real workers with torch, two on this machine: what the fakes of the other tests stand for."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from health.active.coordinator import start
from health.active.coordinator.procedure import WantedTests, run
from health.active.coordinator.session import TestSession
from health.active_tests import Judged

NODES = ("n1", "n2")


def judged_of(*tests: str) -> Judged:
    pytest.importorskip("torch")

    async def body() -> Judged:
        session = TestSession(dict.fromkeys(NODES, 1))
        await session.open("127.0.0.1")
        workers = [start.here(session, node, sys.executable) for node in NODES]
        try:
            await session.gather(120)
            assert not [why for node in NODES for why in session.missing(node)]
            return await run(session, NODES, WantedTests(tests, "quick", 60, seed=3))
        finally:
            await session.close()
            for worker in workers:
                await worker.stop()

    return asyncio.run(body())


def test_a_worker_that_takes_no_signal_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """State D cannot be had here: signals that do not arrive stand for it."""
    monkeypatch.setattr(start, "TERM_S", 0.1)
    monkeypatch.setattr(start, "KILL_S", 0.1)
    before, pids = open_files(), list[int]()

    async def body() -> None:
        started = start.WorkerProcess(TestSession({"n1": 1}), ["n1"], "the worker")
        started.start(["sleep", "60"], {"PATH": "/usr/bin:/bin"}, signal.SIGKILL)
        assert started._process is not None
        pids.append(started._process.pid)
        with monkeypatch.context() as patch:
            patch.setattr(start, "_kill", lambda group, sent: None)
            await asyncio.wait_for(started.stop(), 5)
        started._process.kill()
        started._process.wait()

    asyncio.run(body())
    assert f"(process {pids[0]} " in (err := capfd.readouterr().err) and "is abandoned" in err
    assert open_files() <= before


def test_a_full_disk_ends_the_log_and_not_the_wait_for_the_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def body() -> tuple[str, ...]:
        session = TestSession({"n1": 1})
        with open("/dev/full", "wb", buffering=0) as full:
            started = start.WorkerProcess(session, ["n1"], "the worker", full)
            started.start(["echo", "no such device"], {"PATH": "/usr/bin:/bin"}, signal.SIGKILL)
            await asyncio.wait_for(started._ended.wait(), 20)
        return session.missing("n1")

    (why,) = asyncio.run(body())
    assert why.startswith("the worker ended with exit code 0; printed last: ")
    said = "robust-slurm: what the worker prints is no longer kept: "
    assert capsys.readouterr().err.startswith(said)


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.slow
def test_two_workers_agree_and_reach_each_other() -> None:
    before = open_files()
    judged = judged_of("bitwise", "pair")
    assert judged.cleared == set(NODES), (judged.findings, judged.left_out)
    digests = [m.digests for m in judged.measured if m.test == "bitwise"]
    assert len(digests) == 2 and digests[0] == digests[1] and len(digests[0]) == 2
    speeds = [m.values["busbw_gbps"] for m in judged.measured if m.test == "pair"]
    assert len(speeds) == 2 and min(speeds) > 0
    assert open_files() <= before
