"""Observe mode's life: reports without action, and an end that is srun's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from made_job import Job, KeptJournal, beat
from waiting import idle

from srun_wrapper.decide.ladder import Means
from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Exited, Finish, Report
from srun_wrapper.recover.settling import Settling
from srun_wrapper.supervisor import observing
from srun_wrapper.supervisor.observing import Observing
from srun_wrapper.supervisor.step.real_step import RealStep


@pytest.fixture(autouse=True)
def _no_late_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "LAST", 0.05)


class Ended:
    """A step and a settling that are over at once."""

    ended = False
    code = 3

    async def settle(self) -> None:
        pass


def observed(job: Job, acts: Callable[[Observing], None]) -> list[Mapping[str, Any]]:
    """Run observe mode while ``acts`` reports; returns the records of incidents."""
    records: list[Mapping[str, Any]] = []
    step, journal = Ended(), KeptJournal()
    means = Means(1, 0, True, 3)
    life = Observing(
        job.state,
        cast(RealStep, step),
        cast(Settling, step),
        lambda: means,
        journal,
        records.append,
    )

    async def main() -> int:
        task = asyncio.create_task(life.run())
        await asyncio.sleep(0)
        acts(life)
        await idle()
        step.ended = True
        job.state.changed.set()
        return await task

    assert asyncio.run(main()) == 3
    return records


def exited(local: int, code: int) -> Exited:
    return Exited(local + 1, 1, local, code, None, 0.0, "")


def test_a_crash_is_reported_once_and_stops_nothing() -> None:
    job = Job(2, 0, mode="observe")

    def acts(_life: Observing) -> None:
        job.say(0, Report(1, (beat(0, 5, 5), beat(1, 5, 5))))
        job.say(0, exited(0, 1))
        job.say(0, exited(1, 1))

    [record] = observed(job, acts)
    assert record["outcome"] == "observed: would restart all ranks in place"
    assert (record["action"], record["swaps"]) == ("none", [])
    assert not job.state.stopped() and job.state.world.epoch == 1
    assert [n.role for n in job.state.world.places] == [Role.RELEASED, Role.ACTIVE]
    for line in job.lines:
        assert not [m for m in line.sent if type(m).__name__ in ("Stop", "Finish", "Start")]


def test_a_lost_node_would_be_swapped_and_what_follows_is_no_second_incident() -> None:
    job = Job(2, 0, mode="observe")

    def acts(_life: Observing) -> None:
        job.state.lose_silent(job.node(1), "no report", shared=False)
        job.say(0, exited(0, 1))

    [record] = observed(job, acts)
    assert record["outcome"] == "observed: would swap n1 with a spare of the allocation"
    assert record["symptom"] == "node_lost"


def test_steps_in_between_make_a_new_incident_and_a_hang_is_looked_for_once() -> None:
    job = Job(1, 0, mode="observe")
    still = []

    def hang() -> None:
        job.state.lose(job.node(0), "made up", "hang")
        job.node(0).role = Role.ACTIVE

    async def later(life: Observing) -> None:
        hang()
        await idle()
        still.append(life.standing_still())
        job.say(0, Report(1, (beat(0, 9, 9),)))
        still.append(life.standing_still())
        hang()

    tasks = []
    records = observed(job, lambda life: tasks.append(asyncio.ensure_future(later(life))))
    assert len(records) == 2 and still == [True, False]


def test_a_node_that_was_lost_and_connects_again_keeps_its_ranks() -> None:
    """With recovery it is told to end, since another node has its ranks."""
    for mode, told in (("observe", False), ("full", True)):
        job = Job(2, 0, mode=mode)
        job.state.lose(job.node(1), "it did not start its ranks in time")
        line = job.join(1)
        assert any(isinstance(m, Finish) for m in line.sent) is told
