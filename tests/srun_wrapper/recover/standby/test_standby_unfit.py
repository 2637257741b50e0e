"""Standby nodes that do not run robust-task, and requests that Slurm did not hear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import standby_requests
from standby_requests import BUSY, WAITS, StandbyJob, asked, play, srun_count

from robust_slurm.config import Config
from robust_slurm.slurm import Allotted, SlurmError
from srun_wrapper.recover.standby import nodes as standby_nodes
from srun_wrapper.requeue import slurm_wait

standby_job = standby_requests.standby_job


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, standby_job: StandbyJob) -> None:
    monkeypatch.setattr(slurm_wait, "PAUSES", (0.01,))
    monkeypatch.setattr(standby_nodes, "LOOK", 0.05)
    standby_job.standby._config = Config(standby_wait=5.0, standby_start_limit=0.3)


def allotted(
    standby_job: StandbyJob, *nodes: str, state: str = "FAILED"
) -> Callable[[str], list[Allotted]]:
    """Slurm's answer: the n-th srun was given the n-th of these nodes."""

    def answer(_name: str) -> list[Allotted]:
        pairs = enumerate(zip(standby_job.sruns, nodes, strict=False), start=50)
        return [
            Allotted(number, srun.pid, state, "NonZeroExitCode", (node,))
            for number, (srun, node) in pairs
        ]

    return answer


def test_one_that_does_not_run_robust_task_is_excluded(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        standby_job.srun = BUSY
        standby_job.slurm.allotted = allotted(standby_job, "s1")

        async def come() -> None:
            await asked(standby_job, 1)
            standby_job.srun = WAITS
            await srun_count(standby_job, 2)
            standby_job.comes(2)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s2"]
        assert standby_job.asked[1] == ["--ntasks=2", "--exclude=s1"]
        assert standby_job.standby.to_report(True) == {
            "s1": (50, "srun ended before robust-task reported (exit code 1)")
        }
        assert standby_job.standby.to_report(True) == {}

    play(standby_job, scene)
    assert not capfd.readouterr().err


def test_one_that_comes_after_all_for_another_request_is_not_reported(
    standby_job: StandbyJob,
) -> None:
    async def scene() -> None:
        standby_job.srun = BUSY
        standby_job.slurm.allotted = allotted(standby_job, "s2")

        async def others_wait(_count: int) -> None:
            standby_job.srun = WAITS

        standby_job.on_start = others_wait

        async def come() -> None:
            await srun_count(standby_job, 3)
            standby_job.comes(2)  # the second request got the node, which was free again
            standby_job.comes(3)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n1"), 2: (2, "n2")})
        await coming
        assert sorted(node.name for node in came.values()) == ["s2", "s3"]
        assert standby_job.standby.to_report(True) == {}

    play(standby_job, scene)


def test_several_of_them_are_a_shared_cause(
    standby_job: StandbyJob, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        standby_job.srun = BUSY
        standby_job.slurm.allotted = allotted(standby_job, "s1", "s2", "s3", "s4", "s5", "s6")
        assert await standby_job.standby.take({1: (2, "n2")}) == {}
        assert 2 <= len(standby_job.asked) <= 1 + standby_nodes.MOST_UNFIT
        assert standby_job.standby.to_report(False) == {}

    play(standby_job, scene)
    said = capfd.readouterr().err
    assert "partition standby gave 0 of 1 nodes in " in said
    assert "s1: srun ended before robust-task reported (exit code 1); s2: " in said
    assert "robust-task did not run on s1, s2" in said and "is its python there" not in said
    assert "a clock is wrong" in said


@pytest.mark.parametrize("second", ["s1", "s2"])
def test_beside_a_silent_one_another_is_asked_for(standby_job: StandbyJob, second: str) -> None:
    """The first that reports is used."""

    async def scene() -> None:
        standby_job.slurm.allotted = allotted(standby_job, "s1", state="RUNNING")

        async def come() -> None:
            await srun_count(standby_job, 2)
            assert standby_job.asked[1] == ["--ntasks=2", "--exclude=s1"]
            standby_job.comes(int(second[1:]))

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == [second]
        reported = standby_job.standby.to_report(True)
        assert list(reported) == (["s1"] if second == "s2" else [])

    play(standby_job, scene)


def test_it_is_asked_again_when_slurm_was_away(
    standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_nodes, "LOOK", 60.0)  # only what follows the end of srun asks

    async def scene() -> None:
        away = iter([SlurmError("timeout", ("squeue",), "no answer")] * 3)
        known = standby_job.slurm.job

        def job(number: int) -> object:
            for error in away:
                raise error
            return known(number)

        def jobs(_name: str) -> list[Allotted]:
            job(7)
            return allotted(standby_job, "s1")("")  # what slurmctld found when it woke up

        standby_job.srun = BUSY
        standby_job.slurm.allotted = jobs

        async def come() -> None:
            await asked(standby_job, 1)
            standby_job.srun = WAITS
            await srun_count(standby_job, 2)
            standby_job.comes(2)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert list(came) == [1] and standby_job.asked[1] == ["--ntasks=2"]
        assert not standby_job.standby.to_report(True)
        assert [text.partition(" answer")[0] for text in standby_job.said] == [
            "Slurm does not",
            "Slurm",
        ]

    play(standby_job, scene)


def test_slurm_was_away_when_srun_ended(standby_job: StandbyJob) -> None:
    """The absence was seen by a look at what became of the request; Slurm has been back since."""

    async def scene() -> None:
        answers = iter([SlurmError("timeout", ("squeue",), "no answer")])

        def jobs(name: str) -> list[Allotted]:
            for error in answers:
                standby_job.sruns[0].kill()
                raise error
            return allotted(standby_job, "s1")(name)

        standby_job.slurm.allotted = jobs

        async def come() -> None:
            await srun_count(standby_job, 2)
            standby_job.comes(2)

        coming = asyncio.create_task(come())
        came = await standby_job.standby.take({1: (2, "n2")})
        await coming
        assert list(came) == [1] and standby_job.asked[1] == ["--ntasks=2"]
        assert not standby_job.standby.to_report(True)

    play(standby_job, scene)


def test_the_request_waits_for_slurm_but_not_beyond_a_signal(standby_job: StandbyJob) -> None:
    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=60.0, standby_start_limit=0.3)

        def job(_number: int) -> object:
            raise SlurmError("unreachable", ("scontrol",), "connect failure")

        standby_job.slurm.job = job
        taking = asyncio.create_task(standby_job.standby.take({1: (2, "n2")}))
        async with asyncio.timeout(10.0):
            while not standby_job.said:
                await asyncio.sleep(0.01)
        assert not taking.done()
        standby_job.state.signalled = 15
        standby_job.state.changed.set()
        assert await asyncio.wait_for(taking, 10.0) == {}

    play(standby_job, scene)


def test_slurm_was_away_while_a_node_was_awaited(standby_job: StandbyJob) -> None:
    """The node is waited for anew after that."""

    async def scene() -> None:
        standby_job.standby._config = Config(standby_wait=0.3, standby_start_limit=0.3)
        away = iter([SlurmError("timeout", ("squeue",), "no answer")] * 3)

        def reasons(_name: str) -> set[str]:
            for error in away:
                raise error
            standby_job.comes(1)
            return set()

        standby_job.slurm.waiting_reasons = reasons
        came = await asyncio.wait_for(standby_job.standby.take({1: (2, "n2")}), 10.0)
        assert [node.name for node in came.values()] == ["s1"]

    play(standby_job, scene)
