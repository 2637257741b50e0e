"""Events while a node of the standby partition is awaited, and the reasons why none comes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import standby_requests
from standby_requests import StandbyJob, asked, play, srun_count

from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from srun_wrapper.job.model import Role

standby_job = standby_requests.standby_job


def test_its_node_died_while_it_waited(standby_job: StandbyJob) -> None:
    """Another one is asked for, as early as before."""

    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 1)
        standby_job.comes(1)
        standby_job.state.nodes[(1, "0", 0)].role = Role.DEAD
        standby_job.requests._next_ask = 0.0
        assert standby_job.requests.asking is not None
        await standby_job.requests.asking  # while it asks, no other is asked for
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 2)
        standby_job.comes(2)
        came = await standby_job.standby.take({1: (2, "n2")})
        assert [node.name for node in came.values()] == ["s2"]
        assert len(standby_job.asked) == 2

    play(standby_job, scene)


def test_its_node_dies_while_another_is_awaited(standby_job: StandbyJob) -> None:
    """The next one is asked for at once, without the one that died."""

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=60.0)

        async def come_and_go() -> None:
            await srun_count(standby_job, 2)
            standby_job.comes(1)
            standby_job.state.nodes[(1, "0", 0)].role = Role.DEAD
            standby_job.state.changed.set()
            await srun_count(standby_job, 3)
            assert "--exclude=s1" in standby_job.asked[2]
            standby_job.comes(2)
            standby_job.comes(3)

        coming = asyncio.create_task(come_and_go())
        taken = standby_job.standby.take({1: (2, "n2"), 2: (2, "n3")})
        came = await asyncio.wait_for(taken, 20.0)
        assert {node.name for node in came.values()} == {"s2", "s3"}
        await coming

    play(standby_job, scene)


def test_a_lease_is_lost_while_slurm_is_asked_for_a_second_node(standby_job: StandbyJob) -> None:
    """The place of a lost lease gets a request of its own."""

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=60.0)
        await standby_job.requests.lease(2, ["srun", "lease"])
        await asked(standby_job, 1)
        standby_job.comes(1)
        nodes = standby_job.slurm.nodes

        def lost() -> Any:
            standby_job.state.nodes[(1, "0", 0)].role = Role.DEAD
            return nodes()

        standby_job.slurm.nodes = lost

        async def come() -> None:
            await srun_count(standby_job, 2)
            standby_job.comes(2)
            await srun_count(standby_job, 3)
            standby_job.comes(3)

        coming = asyncio.create_task(come())
        taken = standby_job.standby.take({1: (2, "n2"), 2: (2, "n3")})
        came = await asyncio.wait_for(taken, 10.0)
        assert {node.name for node in came.values()} == {"s2", "s3"}
        await coming

    play(standby_job, scene)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["Resources", "Priority"], "(none became free)"),
        ([], "(none became free)"),
        (None, "(Slurm gives no reason)"),
        (["QOSMaxNodePerUserLimit", "Priority"], "(Slurm's reason: QOSMaxNodePerUserLimit)"),
    ],
)
def test_why_none_came_in_time(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str], reasons: list[str] | None, said: str
) -> None:
    """Report the reason that Slurm gives for our requests."""

    def waiting(name: str) -> set[str]:
        if reasons is None:
            raise SlurmError("denied", ("squeue",), "not for you")
        return set(reasons if name == "robust-standby-7" else ["Held"])

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=0.2)
        standby_job.slurm.waiting_reasons = waiting
        assert await standby_job.standby.take({1: (2, "n2")}) == {}

    play(standby_job, scene)
    assert re.search(rf"gave 0 of 1 nodes in [0-9.]+ s {re.escape(said)}", capfd.readouterr().err)


@pytest.mark.parametrize("given", ["", "early", "late"])
def test_a_job_that_can_go_on_with_fewer_waits_for_a_node_that_was_given_alone(
    standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The node's prolog may take long; one that is not given may take hours. ``late``: it is seen
    when Slurm is asked for the last time."""

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=60.0, shrink_wait=0.3)
        standby_job.slurm.waiting_reasons = lambda _name: {"Resources"}

        async def give() -> None:
            await srun_count(standby_job, 1)
            request = standby_job.requests.get(1)
            assert request is not None

            async def learn(_numbers: object) -> None:
                request.node = "s1" if given else ""

            monkeypatch.setattr(standby_job.requests, "learn_allotted", learn)
            if given == "early":
                await learn(())
            if given:
                await asyncio.sleep(0.6)
                standby_job.comes(1)

        giving = asyncio.create_task(give())
        taken = standby_job.standby.take({1: (2, "n2")}, fewer=True)
        assert bool(await asyncio.wait_for(taken, 20.0)) is bool(given)
        await giving

    play(standby_job, scene)


def test_the_step_ends_meanwhile(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]
) -> None:
    """Someone cancels it: nothing is waited for, and nothing blamed on the partition."""

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=60.0)

        async def cancel() -> None:
            await srun_count(standby_job, 1)
            standby_job.ended = True
            standby_job.state.changed.set()

        cancelling = asyncio.create_task(cancel())
        taken = standby_job.standby.take({1: (2, "n2")})
        assert await asyncio.wait_for(taken, 20.0) == {}
        await cancelling
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)
    assert "gave 0 of" not in capfd.readouterr().err


def test_a_failure_meanwhile_keeps_the_place_in_the_queue(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        async def fail() -> None:
            await srun_count(standby_job, 2)
            standby_job.comes(1)
            standby_job.state.failures.append(None)  # type: ignore[arg-type]
            standby_job.state.changed.set()

        failing = asyncio.create_task(fail())
        came = await standby_job.standby.take({1: (2, "n2"), 2: (2, "n3")})
        await failing
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        standby_job.state.nodes[(1, "0", 0)].role = Role.ACTIVE  # as its place is filled
        standby_job.state.failures.clear()
        assert standby_job.state.awaited >= {2}
        standby_job.comes(2)
        again = await standby_job.standby.take({2: (2, "n3")})
        assert {place: node.name for place, node in again.items()} == {2: "s2"}
        assert len(standby_job.asked) == 2
        assert [process.returncode for process in standby_job.sruns] == [None, None]

    play(standby_job, scene)


def test_what_a_failure_left_over_is_sent_away(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        async def fail() -> None:
            await srun_count(standby_job, 1)
            standby_job.state.failures.append(None)  # type: ignore[arg-type]
            standby_job.state.changed.set()

        failing = asyncio.create_task(fail())
        assert await standby_job.standby.take({1: (2, "n2")}) == {}
        await failing
        assert standby_job.sruns[0].returncode is None
        standby_job.requests.prerequest([], [])
        assert await asyncio.wait_for(standby_job.sruns[0].wait(), 10.0) < 0
        assert not standby_job.requests._requests and not standby_job.state.awaited

    play(standby_job, scene)
