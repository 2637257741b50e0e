"""Before an epoch: who is asked for what there is to restore, and who is not waited for."""

from __future__ import annotations

import asyncio
from typing import cast

import checkpoints_boss
import pytest
from checkpoints_boss import Boss, settled

from srun_wrapper import restoring
from srun_wrapper.checkpoint_messages import (
    Stock,
    StoreReady,
    TakeStock,
)
from srun_wrapper.messages import Message
from srun_wrapper.restoring import Restoring
from srun_wrapper.roster import Node, Role
from srun_wrapper.supervisor import Supervisor

said = checkpoints_boss.said


def test_ranks_that_died_before_they_enrolled_are_started_again(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose rank 1 dies in start-up has nothing to restore, and that is no error."""
    monkeypatch.setattr(restoring, "STOCK", 0.05)

    async def run() -> tuple[bool, Restoring]:
        boss = Boss()
        for rank in range(4):
            boss.checkpoints.heard(boss.nodes[rank], StoreReady(1, 0, 8000 + rank))
        boss.enrol(0)
        found = Restoring(cast(Supervisor, boss))
        return await found.prepare(), found

    ready, found = asyncio.run(run())
    assert ready and found.step is None
    assert said == []


@pytest.mark.parametrize("reachable", [False, True])
def test_a_lost_node_that_answers_no_probe_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    monkeypatch.setattr(restoring, "LEAVING", 0.1 if reachable else 3600.0)

    class Answering(Boss):
        def send(self, node: Node, message: Message) -> None:
            super().send(node, message)
            if isinstance(message, TakeStock) and not node.gone:
                self.checkpoints.heard(node, Stock(message.token, 0, ()))

    async def run() -> list[str]:
        boss = Answering()
        for rank, node in enumerate(boss.nodes):
            node.stores[0] = 8000 + rank
        boss.nodes[3].role, boss.nodes[3].unreachable = Role.DEAD, 0 if reachable else 2
        found = Restoring(cast(Supervisor, boss))
        places = await asyncio.wait_for(found._stock(lambda: False), 60)
        assert len([m for _, m in boss.sent if isinstance(m, TakeStock)]) == 4  # all are asked
        return [place.node for place in places]

    assert asyncio.run(run()) == ["n0", "n1", "n2"]


def test_a_slip_in_the_plan_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(restoring, "say", told.append)
    monkeypatch.setattr(restoring, "STOCK", 0.05)
    monkeypatch.setattr(restoring.planner, "plan", lambda *_: 1 / 0)

    async def run() -> tuple[bool, Restoring]:
        boss = Boss()
        for rank in range(4):
            boss.enrol(rank)
        await settled(boss)
        found = Restoring(cast(Supervisor, boss))
        return await found.prepare(), found

    ready, found = asyncio.run(run())
    assert ready and found.step is None
    assert "internal error" in told[0] and "ZeroDivisionError" in told[0]
