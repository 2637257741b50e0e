"""Events while a node of the standby partition is being asked for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import standby_requests
from standby_requests import StandbyJob, asked, play, srun_count

from srun_wrapper.recover.standby import asking as standby_asking

standby_job = standby_requests.standby_job


def test_messages_while_any_other_node_is_asked_for(standby_job: StandbyJob) -> None:
    """The one that suits best is gone; what is heard of others ends nothing."""

    async def scene() -> None:
        standby_job.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                await standby_job.chatter()

        standby_job.on_start = start

        async def come() -> None:
            while len(standby_job.sruns) < 2:
                await standby_job.chatter()
            standby_job.comes(1)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert standby_job.sruns[1].returncode is None

    play(standby_job, scene)


def test_dropped_while_any_other_node_is_asked_for(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        standby_job.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                standby_job.state.signalled = 15
                await standby_job.chatter()
                assert not standby_job.requests._requests  # take has given up

        standby_job.on_start = start
        assert await standby_job.standby.take({1: (2, "n2")}) == {}
        await srun_count(standby_job, 2)
        assert await asyncio.wait_for(standby_job.sruns[1].wait(), 10.0) < 0
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)


def test_dropped_while_it_is_asked_for(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        async def start(_count: int) -> None:
            standby_job.requests.send_away()

        standby_job.on_start = start
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await srun_count(standby_job, 1)
        assert await asyncio.wait_for(standby_job.sruns[0].wait(), 10.0) < 0
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)


def test_a_robust_task_that_is_just_starting_has_time_to_be_told(
    standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGKILL at once would leave its directory in the node's memory."""
    monkeypatch.setattr(standby_asking, "END", 1.0)

    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await srun_count(standby_job, 1)
        sent = time.monotonic()
        standby_job.requests.send_away()
        assert await asyncio.wait_for(standby_job.sruns[0].wait(), 10.0) < 0
        assert time.monotonic() - sent >= 0.9

    play(standby_job, scene)


def test_srun_cannot_be_run_a_second_time(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        standby_job.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                raise OSError("no more processes")

        standby_job.on_start = start
        assert await standby_job.standby.take({1: (2, "n2")}) == {}
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)
    assert "cannot run srun for a standby node: no more processes" in capfd.readouterr().err


def test_closed_while_it_is_asked_for(standby_job: StandbyJob) -> None:
    """No srun is started any more."""

    async def scene() -> None:
        hurdle = asyncio.Event()

        async def start(count: int) -> None:
            if count == 2:
                await hurdle.wait()

        standby_job.on_start = start
        standby_job.requests.prerequest([(2, "n2"), (2, "n3")], ["n2", "n3"])
        await asked(standby_job, 2)
        await standby_job.requests.close()
        hurdle.set()
        await standby_job.chatter()
        assert len(standby_job.sruns) == 1
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)


def test_a_slip_while_asking_does_not_end_the_job(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        standby_job.slurm.partitions = lambda: 1 // 0
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        assert await standby_job.standby.take({1: (2, "n2")}) == {}

    play(standby_job, scene)
    said = capfd.readouterr().err
    assert said.count("robust-srun: internal error while asking for a node: ZeroDivision") == 1


def test_nobody_waits_for_an_answer_when_the_nodes_are_back_or_the_job_ends(
    standby_job: StandbyJob,
) -> None:
    """slurmctld hangs: first in a question asked ahead of need, then in the one that is needed."""

    async def scene() -> None:
        answered = threading.Event()
        job = standby_job.slurm.job

        def hangs(number: int) -> object:
            answered.wait(30.0)
            return job(number)

        standby_job.slurm.job = hangs
        vacant = [True]
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        taking = standby_job.standby.take({1: (2, "n2")}, vacant=lambda _place: vacant[0])
        ahead = asyncio.create_task(taking)
        await standby_job.chatter()
        assert not ahead.done()
        standby_job.state.signalled = 15
        standby_job.state.changed.set()
        assert await asyncio.wait_for(ahead, 10.0) == {}
        standby_job.state.signalled, standby_job.requests.asking = 0, None
        taking = standby_job.standby.take({1: (2, "n2")}, vacant=lambda _place: vacant[0])
        needed = asyncio.create_task(taking)
        await standby_job.chatter()
        assert not needed.done()
        vacant[0] = False  # it answers again
        standby_job.state.changed.set()
        assert await asyncio.wait_for(needed, 10.0) == {}
        answered.set()

    play(standby_job, scene)
