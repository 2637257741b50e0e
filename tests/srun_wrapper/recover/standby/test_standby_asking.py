"""Events while a node of the standby partition is being asked for."""

from __future__ import annotations

import asyncio
import threading

import pytest
import standby_requests
from standby_requests import Boss, asked, play, srun_count

boss = standby_requests.boss


def test_messages_while_any_other_node_is_asked_for(boss: Boss) -> None:
    """The one that suits best is gone; what is heard of others ends nothing."""

    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                await boss.chatter()

        boss.on_start = start

        async def come() -> None:
            while len(boss.sruns) < 2:
                await boss.chatter()
            boss.comes(1)

        coming = asyncio.create_task(come())
        came = await boss.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert boss.sruns[1].returncode is None

    play(boss, scene)


def test_dropped_while_any_other_node_is_asked_for(boss: Boss) -> None:
    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                boss.state.signalled = 15
                await boss.chatter()
                assert not boss.requests._requests  # take has given up

        boss.on_start = start
        assert await boss.standby.take({1: (2, "n2")}) == {}
        await srun_count(boss, 2)
        assert await asyncio.wait_for(boss.sruns[1].wait(), 10.0) < 0
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)


def test_dropped_while_it_is_asked_for(boss: Boss) -> None:
    async def scene() -> None:
        async def start(_count: int) -> None:
            boss.requests.send_away()

        boss.on_start = start
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await srun_count(boss, 1)
        assert await asyncio.wait_for(boss.sruns[0].wait(), 10.0) < 0
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)


def test_srun_cannot_be_run_a_second_time(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                raise OSError("no more processes")

        boss.on_start = start
        assert await boss.standby.take({1: (2, "n2")}) == {}
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)
    assert "cannot run srun for a standby node: no more processes" in capfd.readouterr().err


def test_closed_while_it_is_asked_for(boss: Boss) -> None:
    """Nothing is started any more."""

    async def scene() -> None:
        hurdle = asyncio.Event()

        async def start(count: int) -> None:
            if count == 2:
                await hurdle.wait()

        boss.on_start = start
        boss.requests.prerequest([(2, "n2"), (2, "n3")], ["n2", "n3"])
        await asked(boss, 2)
        await boss.requests.close()
        hurdle.set()
        await boss.chatter()
        assert len(boss.sruns) == 1
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)


def test_a_slip_while_asking_does_not_end_the_job(
    boss: Boss, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        boss.slurm.partitions = lambda: 1 // 0
        boss.requests.prerequest([(2, "n2")], ["n2"])
        assert await boss.standby.take({1: (2, "n2")}) == {}

    play(boss, scene)
    said = capfd.readouterr().err
    assert said.count("robust-srun: internal error while asking for a node: ZeroDivision") == 1


def test_nobody_waits_for_an_answer_when_the_nodes_are_back_or_the_job_ends(boss: Boss) -> None:
    """slurmctld hangs: first in a question asked ahead of need, then in the one that is needed."""

    async def scene() -> None:
        answered = threading.Event()
        job = boss.slurm.job

        def hangs(number: int) -> object:
            answered.wait(30.0)
            return job(number)

        boss.slurm.job = hangs
        vacant = [True]
        boss.requests.prerequest([(2, "n2")], ["n2"])
        taking = boss.standby.take({1: (2, "n2")}, vacant=lambda _place: vacant[0])
        ahead = asyncio.create_task(taking)
        await boss.chatter()
        assert not ahead.done()
        boss.state.signalled = 15
        boss.state.changed.set()
        assert await asyncio.wait_for(ahead, 10.0) == {}
        boss.state.signalled, boss.requests.asking = 0, None
        taking = boss.standby.take({1: (2, "n2")}, vacant=lambda _place: vacant[0])
        needed = asyncio.create_task(taking)
        await boss.chatter()
        assert not needed.done()
        vacant[0] = False  # it answers again
        boss.state.changed.set()
        assert await asyncio.wait_for(needed, 10.0) == {}
        answered.set()

    play(boss, scene)
