"""Nodes of the standby partition: asked for, used, given back, refused."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import standby_requests
from standby_requests import BUSY, WAITS, Boss, asked, play

from srun_wrapper.job.model import Role
from srun_wrapper.recover.standby import asking as standby_asking

boss = standby_requests.boss


def test_one_that_was_asked_for_early_is_used(boss: Boss) -> None:
    async def scene() -> None:
        for _ in range(3):  # the watch says it again and again
            boss.requests.prerequest([(2, "n2")], ["n2"])
            await asyncio.sleep(0)
        await asked(boss, 1)
        boss.comes(1)
        came = await boss.standby.take({1: (2, "n2")})
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        assert boss.asked == [["--ntasks=2", "--exclude=n2"]]
        boss.requests.prerequest([], [])  # what is in use stays
        assert boss.events == ["companions_asked"]

    play(boss, scene)


def test_one_that_is_not_needed_is_given_back(boss: Boss) -> None:
    async def scene() -> None:
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        (request,) = boss.requests._requests.values()
        boss.requests.prerequest([], [])
        assert request.process is not None
        assert await asyncio.wait_for(request.process.wait(), 10.0) < 0
        assert boss.state.nodes[(1, "0", 0)].role is Role.RELEASED and not boss.state.awaited
        assert boss.events == ["companions_asked", "companion_sent_away"]

    play(boss, scene)


def test_one_that_is_sent_away_tidies_its_node_before_slurm_kills_it(
    boss: Boss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy = tmp_path / "tidy"
    boss.srun = f"import os, time\nwhile not os.path.exists({str(tidy)!r}): time.sleep(0.01)"
    monkeypatch.setattr(standby_asking, "END", 30.0)

    async def scene() -> None:
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        boss.requests.prerequest([], [])
        tidy.touch()
        assert await asyncio.wait_for(boss.sruns[0].wait(), 20.0) == 0

    play(boss, scene)


@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_is_sent_away_when_the_job_ends_tidies_its_node_or_is_ended(
    boss: Boss, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    boss.srun = WAITS if hangs else "import time; time.sleep(0.2)"
    monkeypatch.setattr(standby_asking, "END", 0.2 if hangs else 30.0)

    async def scene() -> None:
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        boss.requests.prerequest([], [])
        await boss.requests.close()
        code = await asyncio.wait_for(boss.sruns[0].wait(), 10.0)
        assert code == (-signal.SIGTERM if hangs else 0)

    play(boss, scene)


def test_a_larger_place_needs_another(boss: Boss) -> None:
    async def scene() -> None:
        boss.requests.prerequest([(2, "n2")], ["n2"])
        await asked(boss, 1)

        async def come() -> None:
            await asked(boss, 2)
            boss.comes(2)

        coming = asyncio.create_task(come())
        came = await boss.standby.take({3: (8, "n5")})
        await coming
        assert [node.name for node in came.values()] == ["s2"]
        assert boss.asked[1] == ["--ntasks=8"]

    play(boss, scene)


def test_the_node_that_suits_best_is_taken_by_another_job(boss: Boss) -> None:
    """Then any node of the partition will do."""

    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def come() -> None:
            await asked(boss, 2)
            boss.comes(1)

        coming = asyncio.create_task(come())
        came = await boss.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert boss.asked == [
            ["--nodelist=s9", f"--immediate={standby_asking.AT_ONCE}", "--ntasks=2"],
            ["--ntasks=2"],
        ]

    play(boss, scene)


def test_refused(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.srun = BUSY
        assert await boss.standby.take({1: (2, "n2")}) == {}
        assert not boss.state.awaited

    play(boss, scene)
    assert "partition standby gave 0 of 1 nodes" in capfd.readouterr().err


def test_no_such_partition(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.slurm.partitions = dict
        boss.requests.prerequest([(2, "n2")], ["n2"])
        assert await boss.standby.take({1: (2, "n2")}) == {}

    play(boss, scene)
    assert "no partition 'standby'" in capfd.readouterr().err
    assert boss.asked == []
