"""Silent nodes: which answers of the second way make a loss."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job

from robust_slurm.config import Config
from srun_wrapper import watch
from srun_wrapper.replace import MAX_COMPANIONS, Replacement
from srun_wrapper.roster import Role
from srun_wrapper.watch import BROKEN, MUTE, UNANSWERED, NodeWatch


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the second way answers, one after another, to whoever asks."""
    coming: list[str] = []

    async def probe(_host: str, _port: int, *times: object) -> str:
        assert times == (watch.PROBE_TIMEOUT, watch.PROBED_AGAIN)
        return coming.pop(0)

    monkeypatch.setattr(watch, "probe", probe)
    monkeypatch.setattr(watch, "ASK_AGAIN", 0.0)
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
        (["unreachable", "accepted"], True),  # the network stumbled
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
        (True, 1.0, ["unreachable"], True),
        (True, 1.0, ["accepted", "accepted"], False),
        (True, MUTE - 1, ["accepted"], False),
        (True, MUTE + 1, ["accepted"], True),
        (None, 1.0, ["unreachable"], False),  # it fell silent before it was asked
        (None, 1.0, ["unreachable", "accepted", "unreachable"], False),
        (None, 1.0, ["unreachable", "unreachable"], True),
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
    assert (job.node(0).role is Role.DEAD) is lost
    assert [f.symptom for f in job.state.failures] == ["node_lost"] * lost
    assert len(news) == lost


def test_one_that_could_not_be_asked_while_it_was_well(answers: list[str]) -> None:
    """Once is enough to doubt that it ever can be."""
    job = Job(1, 0)
    ask(job, answers, "unreachable")
    assert (job.node(0).second_way, job.node(0).turned_away) == (None, 1)
    ask(job, answers, "unreachable", "unreachable", silent=MUTE - 1)
    assert job.node(0).role is Role.ACTIVE
    ask(job, answers, "unreachable", silent=MUTE + 1)
    assert job.node(0).role is Role.DEAD


def test_one_that_speaks_while_it_is_asked(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1, 0)
    job.node(0).second_way = True
    asked = watch.probe

    async def probe(*where: Any) -> str:
        job.node(0).last_word = time.monotonic()
        return await asked(*where)

    monkeypatch.setattr(watch, "probe", probe)
    ask(job, answers, "unreachable", silent=1.0)
    assert (job.node(0).role, job.node(0).unreachable) == (Role.ACTIVE, 0)


def test_one_that_answers_is_not_asked_all_the_time(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes what a stopped process was sent out of its queue, and that is short."""
    monkeypatch.setattr(watch, "ASK_AGAIN", 60.0)
    job = Job(1, 0)
    job.node(0).second_way = True
    ask(job, answers, "accepted", silent=1.0)
    nodes = NodeWatch(job.state)
    nodes.look(time.monotonic())  # would need a running loop to ask anybody
    assert not job.node(0).probing
    assert job.node(0).role is Role.ACTIVE


def test_a_node_that_falls_silent_while_it_is_asked_whether_it_can_be_asked(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was no second way yet: it is asked anew."""
    job = Job(1, 0)
    asked = watch.probe

    async def probe(*where: Any) -> str:
        job.node(0).last_word -= 1.0
        return await asked(*where)

    monkeypatch.setattr(watch, "probe", probe)
    ask(job, answers, "unreachable")
    assert (job.node(0).role, job.node(0).turned_away) == (Role.ACTIVE, 0)


# -- suspicion: companions are asked for before a node is proven to be lost


class Expected:
    """A Replacement, and what it expects of its companions."""

    def __init__(self, job: Job) -> None:
        boss: Any = SimpleNamespace(
            state=job.state,
            config=Config(standby_partition="standby"),
            node_watch=NodeWatch(job.state),
            step=SimpleNamespace(ended=False),
            ledger=SimpleNamespace(dir=None),
        )
        self.boss = boss
        self._replacement = Replacement(boss, SimpleNamespace())  # type: ignore[arg-type]
        self._replacement._companions = self  # type: ignore[assignment]
        self._suspects: list[str] = []

    def expect(self, _wanted: Any, suspects: list[str]) -> None:
        self._suspects = suspects

    def now(self) -> list[str]:
        self._replacement.suspect(time.monotonic())
        return self._suspects


def heard(job: Job) -> None:
    for node in job.state.nodes.values():
        node.last_word = time.monotonic()


@pytest.mark.parametrize(
    ("nodes", "config", "interval", "patience"),
    [
        (1, {}, 0.25, 0.5),
        (64, {}, 0.25, 0.5),
        (65, {}, 0.5, 0.75),
        (256, {}, 0.5, 0.75),
        (257, {}, 1.0, 1.5),
        (257, {"interval": 0.1}, 0.1, 0.35),
        (2, {"interval": 3.0}, 3.0, 4.5),
    ],
)
def test_how_often_nodes_report_and_when_one_is_missed(
    nodes: int, config: dict[str, float], interval: float, patience: float
) -> None:
    state = Job(nodes, 0, **config).state
    assert (state.interval, NodeWatch(state).patience()) == (interval, patience)


@pytest.mark.parametrize(
    ("trouble", "doubted"),
    [
        ({"last_word": 0.4, "probing": True, "asked_at": 1.0}, False),  # its report may be late
        ({"last_word": 1.0}, False),  # a machine with a lot to do: its host has answered
        ({"last_word": 1.0, "probing": True, "asked_at": UNANSWERED / 2}, False),
        ({"last_word": 1.0, "probing": True, "asked_at": UNANSWERED * 2}, True),
        ({"last_word": 1.0, "unreachable": 1}, True),
        # Asked whether it can be asked, or heard of meanwhile:
        ({"probing": True, "asked_at": 1.0}, False),
        ({"closed_at": BROKEN / 2}, False),
        ({"closed_at": BROKEN * 2}, True),
        ({"last_word": 5.0}, True),
    ],
)
def test_a_node_in_doubt_may_have_to_be_replaced(trouble: dict[str, Any], doubted: bool) -> None:
    """``last_word``, ``asked_at`` and ``closed_at``: so many seconds ago."""
    job = Job(2, 0)
    expected, node = Expected(job), job.node(1)
    heard(job)
    assert expected.now() == []
    for name, value in trouble.items():
        ago = name in ("last_word", "asked_at", "closed_at")
        setattr(node, name, time.monotonic() - value if ago else value)
    assert expected.now() == [node.name] * doubted
    node.last_word, node.closed_at = time.monotonic(), None
    assert expected.now() == []


def test_nobody_is_asked_for_when_the_step_is_being_ended() -> None:
    job = Job(2, 0)
    expected = Expected(job)
    heard(job)
    job.node(1).last_word -= 5.0
    assert expected.now()
    expected.boss.step.ended = True
    assert not expected.now()
    expected.boss.step.ended, job.state.signalled = False, 15
    assert not expected.now()


def test_more_silent_nodes_than_can_be_replaced() -> None:
    job = Job(MAX_COMPANIONS + 1, 0)
    expected = Expected(job)
    heard(job)
    for index in range(MAX_COMPANIONS):
        job.node(index).last_word -= 5.0
    assert len(expected.now()) == MAX_COMPANIONS
    job.node(MAX_COMPANIONS).last_word -= 5.0
    assert expected.now() == []


def test_a_failing_watch_silences_no_other() -> None:
    said, looked = list[str](), list[float]()
    guard = watch.Guard(said.append)

    def fails(_now: float) -> None:
        raise KeyError("n1")

    for now in (1.0, 2.0):
        for each in (fails, looked.append):
            guard.call(each, now)
    assert looked == [1.0, 2.0]
    assert len(said) == 1 and "fails: KeyError: 'n1'" in said[0]
