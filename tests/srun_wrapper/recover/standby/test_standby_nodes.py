"""Nodes of the standby partition: asked for, used, given back, refused."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import standby_requests
from standby_requests import BUSY, WAITS, StandbyJob, asked, play

from srun_wrapper.job.model import Role
from srun_wrapper.recover.standby import asking as standby_asking

standby_job = standby_requests.standby_job


def test_one_that_was_asked_for_early_is_used(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        for _ in range(3):  # the watch says it again and again
            standby_job.requests.prerequest([(2, "n2")], ["n2"])
            await asyncio.sleep(0)
        await asked(standby_job, 1)
        standby_job.comes(1)
        came = await standby_job.standby.take({1: (2, "n2")})
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        assert standby_job.asked == [["--ntasks=2", "--exclude=n2"]]
        standby_job.requests.prerequest([], [])  # what is in use stays
        assert standby_job.events == ["standby_requested"]

    play(standby_job, scene)


def test_one_that_is_not_needed_is_given_back(
    standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while the doubt may return: a request made again may preempt a second job."""

    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 1)
        standby_job.comes(1)
        (request,) = standby_job.requests._requests.values()
        standby_job.requests.prerequest([], [])
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        standby_job.requests.prerequest([], [])
        assert standby_job.events == ["standby_requested"]
        monkeypatch.setattr(standby_asking, "AGAIN", 0.0)
        standby_job.requests.prerequest([], [])
        assert request.process is not None
        assert await asyncio.wait_for(request.process.wait(), 10.0) < 0
        assert (
            standby_job.state.nodes[(1, "0", 0)].role is Role.RELEASED
            and not standby_job.state.awaited
        )
        assert standby_job.events == ["standby_requested", "standby_request_withdrawn"]

    play(standby_job, scene)


def test_one_that_is_sent_away_tidies_its_node_before_slurm_kills_it(
    standby_job: StandbyJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy = tmp_path / "tidy"
    standby_job.srun = f"import os, time\nwhile not os.path.exists({str(tidy)!r}): time.sleep(0.01)"
    monkeypatch.setattr(standby_asking, "END", 30.0)

    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 1)
        standby_job.comes(1)
        standby_job.requests.send_away()
        tidy.touch()
        assert await asyncio.wait_for(standby_job.sruns[0].wait(), 20.0) == 0

    play(standby_job, scene)


@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_is_sent_away_when_the_job_ends_tidies_its_node_or_is_ended(
    standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    standby_job.srun = WAITS if hangs else "import time; time.sleep(0.2)"
    monkeypatch.setattr(standby_asking, "END", 0.2 if hangs else 30.0)

    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 1)
        standby_job.comes(1)
        standby_job.requests.send_away()
        await standby_job.requests.close()
        code = await asyncio.wait_for(standby_job.sruns[0].wait(), 10.0)
        assert code == (-signal.SIGTERM if hangs else 0)

    play(standby_job, scene)


def test_a_larger_place_needs_another(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        await asked(standby_job, 1)

        async def come() -> None:
            await asked(standby_job, 2)
            standby_job.comes(2)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({3: (8, "n5")})
        await coming
        assert [node.name for node in came.values()] == ["s2"]
        assert standby_job.asked[1] == ["--ntasks=8"]

    play(standby_job, scene)


def test_the_node_that_suits_best_is_taken_by_another_job(standby_job: StandbyJob) -> None:
    """Any node of the partition will do in this case."""

    async def scene() -> None:
        standby_job.best = {"n2": "s9"}

        async def come() -> None:
            await asked(standby_job, 2)
            standby_job.comes(1)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert standby_job.asked == [
            ["--nodelist=s9", f"--immediate={standby_asking.AT_ONCE}", "--ntasks=2"],
            ["--ntasks=2"],
        ]

    play(standby_job, scene)


def test_refused(standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        standby_job.srun = BUSY
        assert await standby_job.standby.take({1: (2, "n2")}) == {}
        assert not standby_job.state.awaited

    play(standby_job, scene)
    assert "partition standby gave 0 of 1 nodes" in capfd.readouterr().err


def test_no_such_partition(standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        standby_job.slurm.partitions = dict
        standby_job.requests.prerequest([(2, "n2")], ["n2"])
        assert await standby_job.standby.take({1: (2, "n2")}) == {}

    play(standby_job, scene)
    assert "no partition 'standby'" in capfd.readouterr().err
    assert standby_job.asked == []
