"""Silent nodes: which answers of the second way make a loss."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from test_state import Job

from srun_wrapper import watch
from srun_wrapper.roster import Role
from srun_wrapper.watch import MUTE, NodeWatch


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the second way answers, one after another, to whoever asks."""
    coming: list[str] = []

    async def probe(*_where: Any) -> str:
        return coming.pop(0)

    monkeypatch.setattr(watch, "probe", probe)
    return coming


def ask(job: Job, answers: list[str], *given: str, silent: float = 0.0) -> list[str]:
    """Look at the only node until all these answers were given; the news meanwhile."""
    news: list[str] = []
    job.state.on_news = news.append
    node = job.node(0)
    answers[:] = given

    async def look() -> None:
        nodes = NodeWatch(job.state)
        while answers:
            node.last_word = time.monotonic() - silent
            nodes.look(time.monotonic())
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(look(), 10))
    return news


@pytest.mark.parametrize(
    ("given", "second_way"),
    [
        (["accepted"], True),
        (["unreachable", "accepted"], True),  # one lost packet
        (["unreachable", "unreachable"], False),
        (["refused", "unreachable"], False),
    ],
)
def test_a_node_that_is_well_is_asked_whether_it_can_be_asked(
    answers: list[str], given: list[str], second_way: bool
) -> None:
    job = Job(1, 0)
    news = ask(job, answers, *given)
    node = job.node(0)
    assert (node.second_way, node.role) == (second_way, Role.ACTIVE)
    assert len(news) == (not second_way)


@pytest.mark.parametrize(
    ("second_way", "silent", "given", "lost"),
    [
        (True, 1.0, ["refused"], True),
        (True, 1.0, ["unreachable"], False),
        (True, 1.0, ["unreachable", "accepted", "unreachable"], False),
        (True, 1.0, ["unreachable", "unreachable"], True),
        (True, MUTE - 1, ["accepted"], False),
        (True, MUTE + 1, ["accepted"], True),
        (None, 1.0, ["unreachable", "unreachable"], True),  # it fell silent before it was asked
        (False, MUTE - 1, ["refused", "unreachable", "unreachable"], False),
        (False, MUTE + 1, ["unreachable"], True),
    ],
)
def test_a_silent_node(
    answers: list[str], second_way: bool | None, silent: float, given: list[str], lost: bool
) -> None:
    job = Job(1, 0)
    job.node(0).second_way = second_way
    news = ask(job, answers, *given, silent=silent)
    assert (job.node(0).role is Role.LOST) is lost
    assert [f.symptom for f in job.state.failures] == ["node_lost"] * lost
    assert len(news) == lost
