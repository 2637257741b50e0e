"""Nodes that leave the job: their last orders, and what they get when they connect again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job, KeptJournal, as_connection

from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Finish, Start, Stop
from srun_wrapper.recover.release import Release
from srun_wrapper.requeue.slurm_wait import Controller

INCIDENT: Any = SimpleNamespace()


class Leaving:
    """A job of two nodes and a spare that are in the first epoch, and the part under test."""

    def __init__(self) -> None:
        self.job = Job()
        self.asked: list[str] = []
        self.state = self.job.state
        for index, node in enumerate(self.state.world.places):
            self.state.bus.send(node, Start(1, {}, (), 5.0, index, True, 2, "n0", 7001))
        reports: Any = SimpleNamespace(
            judge=lambda *_: None, report_silent=lambda: None, stays=lambda _name: None
        )
        requests: Any = SimpleNamespace(end=lambda _request: None)
        wait: Any = SimpleNamespace(insist=self.insist)
        slurm: Any = SimpleNamespace()
        controller = Controller(slurm, wait)
        self.release = Release(self.state, controller, reports, requests, KeptJournal())

    async def insist(self, what: str, _request: object) -> None:
        """Stand for Slurm."""
        self.asked.append(what)

    def give_back(self) -> None:
        """Release the nodes that are gone."""

        async def whole() -> None:
            self.release.release(INCIDENT)
            await self.release.close()

        asyncio.run(whole())


def kinds(messages: list[Any]) -> list[type[Any]]:
    return [type(message) for message in messages if isinstance(message, Start | Stop | Finish)]


def test_an_evicted_node_that_connects_again_gets_no_start_and_ends() -> None:
    leaving = Leaving()
    node = leaving.job.node(1)
    leaving.release.evict((node.name,), INCIDENT)
    assert kinds(leaving.job.lines[1].sent) == [Start, Stop]
    assert kinds(leaving.job.join(1, epoch=1).sent) == [Finish]
    leaving.give_back()
    assert kinds(leaving.job.join(1, epoch=1).sent) == [Finish]


def test_the_stop_of_a_reinstated_node_is_sent_again_on_its_next_connection() -> None:
    leaving = Leaving()
    node = leaving.job.node(1)
    leaving.release.evict((node.name,), INCIDENT)
    leaving.release.reinstate((node.name,))
    assert node.role is Role.ACTIVE
    assert kinds(leaving.job.join(1, epoch=1).sent) == [Stop]


def test_slurm_is_asked_only_where_a_node_is_given_back() -> None:
    """After a restart in place, too, it was asked to release "" from the job."""
    leaving = Leaving()
    leaving.give_back()
    assert leaving.asked == []
    leaving.release.evict((leaving.job.node(1).name,), INCIDENT)
    leaving.give_back()
    assert leaving.asked == ["release n1 from the job (unused in it until then)"]


@pytest.mark.parametrize("connected", [True, False])
def test_a_silent_spare_that_was_given_back_to_slurm_is_not_reinstated(connected: bool) -> None:
    leaving = Leaving()
    spare = leaving.job.node(2)
    leaving.state.lose_silent(spare, "no word", shared=False)
    if not connected:
        leaving.job.inbox.closed(as_connection(leaving.job.lines[2]))
    leaving.give_back()
    assert kinds(leaving.job.join(2).sent) == [Finish]
    assert spare.role is Role.DEAD


def test_a_silent_spare_that_was_not_given_back_is_reinstated() -> None:
    leaving = Leaving()
    spare = leaving.job.node(2)
    leaving.state.lose_silent(spare, "no word", shared=False)
    assert kinds(leaving.job.join(2).sent) == []
    assert spare.role is Role.SPARE
