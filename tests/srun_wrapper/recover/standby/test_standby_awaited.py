"""Events while a node of the standby partition is awaited, and the reasons why none comes."""

from __future__ import annotations

import asyncio
import re

import pytest
import standby_requests
from standby_requests import Boss, asked, play, srun_count

from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from srun_wrapper.supervisor.model import Role

boss = standby_requests.boss


def test_its_node_died_while_it_waited(boss: Boss) -> None:
    """Another one is asked for, as early as before."""

    async def scene() -> None:
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        boss.state.nodes[(1, "0", 0)].role = Role.DEAD
        boss.requests._next_ask = 0.0
        assert boss.requests.asking is not None
        await boss.requests.asking  # while it asks, no other is asked for
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 2)
        boss.comes(2)
        came = await boss.standby.take({1: (2, "n2")})
        assert [node.name for node in came.values()] == ["s2"]
        assert len(boss.asked) == 2

    play(boss, scene)


def test_its_node_dies_while_another_is_awaited(boss: Boss) -> None:
    """The next one is asked for at once, without the one that died."""

    async def scene() -> None:
        boss.standby._config = Config(standby_wait=60.0)

        async def come_and_go() -> None:
            await srun_count(boss, 2)
            boss.comes(1)
            boss.state.nodes[(1, "0", 0)].role = Role.DEAD
            boss.state.changed.set()
            await srun_count(boss, 3)
            assert "--exclude=s1" in boss.asked[2]
            boss.comes(2)
            boss.comes(3)

        coming = asyncio.create_task(come_and_go())
        taken = boss.standby.take({1: (2, "n2"), 2: (2, "n3")})
        came = await asyncio.wait_for(taken, 20.0)
        assert {node.name for node in came.values()} == {"s2", "s3"}
        await coming

    play(boss, scene)


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
    boss: Boss, capfd: pytest.CaptureFixture[str], reasons: list[str] | None, said: str
) -> None:
    """Report the reason that Slurm gives for our requests."""

    def waiting(name: str) -> set[str]:
        if reasons is None:
            raise SlurmError("denied", ("squeue",), "not for you")
        return set(reasons if name == "robust-standby-7" else ["Held"])

    async def scene() -> None:
        boss.standby._config = Config(standby_wait=0.2)
        boss.slurm.waiting_reasons = waiting
        assert await boss.standby.take({1: (2, "n2")}) == {}

    play(boss, scene)
    assert re.search(rf"gave 0 of 1 nodes in [0-9.]+ s {re.escape(said)}", capfd.readouterr().err)


def test_the_step_ends_meanwhile(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    """Someone cancels it: nothing is waited for, and nothing blamed on the partition."""

    async def scene() -> None:
        boss.standby._config = Config(standby_wait=60.0)

        async def cancel() -> None:
            await srun_count(boss, 1)
            boss.ended = True
            boss.state.changed.set()

        cancelling = asyncio.create_task(cancel())
        taken = boss.standby.take({1: (2, "n2")})
        assert await asyncio.wait_for(taken, 20.0) == {}
        await cancelling
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)
    assert "gave 0 of" not in capfd.readouterr().err


def test_a_failure_meanwhile_keeps_the_place_in_the_queue(boss: Boss) -> None:
    async def scene() -> None:
        async def fail() -> None:
            await srun_count(boss, 2)
            boss.comes(1)
            boss.state.failures.append(None)  # type: ignore[arg-type]
            boss.state.changed.set()

        failing = asyncio.create_task(fail())
        came = await boss.standby.take({1: (2, "n2"), 2: (2, "n3")})
        await failing
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        boss.state.nodes[(1, "0", 0)].role = Role.ACTIVE  # as its place is filled
        boss.state.failures.clear()
        assert boss.state.awaited >= {2}
        boss.comes(2)
        again = await boss.standby.take({2: (2, "n3")})
        assert {place: node.name for place, node in again.items()} == {2: "s2"}
        assert len(boss.asked) == 2
        assert [process.returncode for process in boss.sruns] == [None, None]

    play(boss, scene)


def test_what_a_failure_left_over_is_sent_away(boss: Boss) -> None:
    async def scene() -> None:
        async def fail() -> None:
            await srun_count(boss, 1)
            boss.state.failures.append(None)  # type: ignore[arg-type]
            boss.state.changed.set()

        failing = asyncio.create_task(fail())
        assert await boss.standby.take({1: (2, "n2")}) == {}
        await failing
        assert boss.sruns[0].returncode is None
        boss.requests.prerequest([], [])
        assert await asyncio.wait_for(boss.sruns[0].wait(), 10.0) < 0
        assert not boss.requests._requests and not boss.state.awaited

    play(boss, scene)
