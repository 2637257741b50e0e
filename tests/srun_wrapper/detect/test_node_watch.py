"""Silent nodes: when the second way is tried, and which of its answers make a loss."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from made_job import Job, beat, silent_nodes

from robust_slurm.config import Config
from srun_wrapper.detect import node_watch
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Report

MUTE, STALL = Config().mute_limit, Config().stall_limit
STEP = 0.1  # s


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers of the second way, one after another, to whoever asks."""
    coming: list[str] = []

    async def probe(_host: str, _port: int, *times: object) -> str:
        assert times == (node_watch.PROBE_TIMEOUT, node_watch.PROBED_AGAIN)
        return coming.pop(0)

    monkeypatch.setattr(node_watch, "probe", probe)
    monkeypatch.setattr(node_watch, "ASK_AGAIN", 0.0)
    monkeypatch.setattr(node_watch, "AGAIN_REFUSED", 0.0)
    monkeypatch.setattr(node_watch, "REBORN", 0.0)
    return coming


def stepping(job: Job, last: float | None = None) -> Job:
    """Let the ranks of the first node have made their last step so many s ago.

    None: when the silent node gave its last word.
    """
    job.say(0, Report(1, (beat(0, 10, 10),)))
    pace = job.state.pace
    pace.steps, pace.slowest, pace.recent = 10, STEP, [STEP] * 10
    pace.stepped = 0.0 if last is None else time.monotonic() - last
    return job


def ask(
    job: Job, answers: list[str], *given: str, silent: float = 0.0, said: list[str] | None = None
) -> list[str]:
    """Look at one node of three until all these answers were given; the news meanwhile."""
    news: list[str] = []
    job.state.on_news = news.append
    node = job.node(1)
    answers[:] = given
    for other in (job.node(0), job.node(2)):
        other.second_way, other.last_word = True, time.monotonic() + 60.0

    async def look() -> None:
        nodes = NodeWatch(job.state, say=(said if said is not None else []).append)
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
    job = Job(3, 0)
    news = ask(job, answers, *given)
    node = job.node(1)
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
    job = stepping(Job(3, 0))
    job.node(1).second_way = second_way
    news = ask(job, answers, *given, silent=silent)
    assert (job.node(1).role is Role.DEAD) is lost
    assert [f.symptom for f in job.state.failures] == ["node_lost"] * lost
    assert [f.shared for f in job.state.failures] == [silent > MUTE] * lost
    assert len(news) == lost


@pytest.mark.parametrize(
    ("second_way", "silent", "stepped", "lost"),
    [
        (True, 60.0, 1.0, False),  # robust-task is stopped, its ranks are not
        (True, 60.0, MUTE / 2, False),
        (True, 60.0, MUTE + 1, True),  # now the whole job stands
        (True, MUTE + 1, MUTE + 0.9, True),  # its last step
        (False, 60.0, 1.0, False),  # a firewall between
        (False, 60.0, MUTE + 1, True),
    ],
)
def test_steps_of_the_others_outweigh_its_silence(
    answers: list[str], second_way: bool, silent: float, stepped: float, lost: bool
) -> None:
    job, said = stepping(Job(3, 0), stepped), list[str]()
    job.node(1).second_way = second_way
    ask(job, answers, "accepted", silent=silent, said=said)
    assert (job.node(1).role is Role.DEAD) is lost
    assert [f.shared for f in job.state.failures] == [True] * lost
    assert len(said) == (not lost)
    assert all(
        "robust-task on n1 has been silent for 60 s, but the job steps on" in s for s in said
    )


@pytest.mark.parametrize("what", ["no steps", "start", "phase", "end", "ranks of its own only"])
def test_where_steps_say_nothing_it_is_waited_for_long(answers: list[str], what: str) -> None:
    job, said = stepping(Job(3, 0)), list[str]()
    pace, ranks = job.state.pace, job.state.world.by_rank
    pace.steps = 1 if what == "start" else pace.steps
    if what == "no steps":
        pace.slowest = 0.0
    elif what == "phase":
        pace.in_phase("eval", time.monotonic(), time.monotonic())
    elif what == "end":
        ranks[0].exit = (0, 0)
    elif what == "ranks of its own only":
        ranks[0].beats, ranks[2].beats = 0, 10
    job.node(1).second_way = True
    ask(job, answers, "accepted", silent=STALL - 1, said=said)
    assert job.node(1).role is Role.ACTIVE
    assert len(said) == 0  # it was too late to say so
    ask(job, answers, "accepted", silent=60.0, said=said)
    assert "the node's kernel answers: waiting for it up to 540 s more" in said[0]
    ask(job, answers, "accepted", silent=STALL + 1)
    assert job.node(1).role is Role.DEAD and job.state.failures[0].shared


@pytest.mark.parametrize("role", [Role.SPARE, Role.ACTIVE])
def test_a_spare_or_one_that_holds_a_recovery_up_is_not_waited_for_long(
    answers: list[str], role: Role
) -> None:
    job = Job(3, 0)
    job.node(1).second_way, job.node(1).role = True, role
    job.state.members.stopping_epoch = job.state.world.epoch
    ask(job, answers, "accepted", silent=MUTE + 1)
    assert job.node(1).role is Role.DEAD


def test_one_that_answers_again_is_said_to(answers: list[str]) -> None:
    job, said = stepping(Job(3, 0), 1.0), list[str]()
    job.node(1).second_way = True
    nodes = NodeWatch(job.state, say=said.append)
    answers[:] = ["accepted"]

    async def look() -> None:
        job.node(1).last_word = time.monotonic() - 60.0
        for other in (job.node(0), job.node(2)):
            other.second_way, other.last_word = True, time.monotonic() + 60.0
        nodes.look(time.monotonic())
        await asyncio.sleep(0.01)
        job.say(1, Report(1, ()))
        nodes.look(time.monotonic())

    asyncio.run(look())
    assert len(said) == 2 and said[1] == "n1 is heard again after 60 s"


def test_after_an_outage_an_agent_has_time_to_connect_anew(answers: list[str]) -> None:
    """The agent's host answers before the agent; the agent's silence until then says nothing."""
    job = stepping(Job(3, 0, outage_wait=600.0))
    job.node(1).second_way, job.node(1).unreachable = True, 3
    ask(job, answers, "accepted", "accepted", silent=3 * MUTE)
    assert job.node(1).role is Role.ACTIVE and not job.state.failures
    job.node(1).reachable_at -= MUTE
    ask(job, answers, "accepted", silent=3 * MUTE)
    assert job.node(1).role is Role.DEAD


def test_one_that_could_not_be_asked_while_it_was_well(answers: list[str]) -> None:
    """Once is enough to doubt that it ever can be."""
    job = Job(3, 0)
    ask(job, answers, "unreachable")
    assert (job.node(1).second_way, job.node(1).turned_away) == (None, 1)
    ask(job, answers, "unreachable", "unreachable", silent=MUTE - 1)
    assert job.node(1).role is Role.ACTIVE
    ask(job, answers, "unreachable", silent=MUTE + 1)
    assert job.node(1).role is Role.DEAD


def test_one_that_speaks_while_it_is_asked(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(3, 0)
    job.node(1).second_way = True
    asked = node_watch.probe

    async def probe(*where: Any) -> str:
        job.node(1).last_word = time.monotonic()
        return await asked(*where)

    monkeypatch.setattr(node_watch, "probe", probe)
    ask(job, answers, "unreachable", silent=1.0)
    assert (job.node(1).role, job.node(1).unreachable) == (Role.ACTIVE, 0)


def test_one_that_answers_is_not_asked_all_the_time(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process reads nothing from its accept queue, which is short."""
    monkeypatch.setattr(node_watch, "ASK_AGAIN", 60.0)
    job = Job(3, 0)
    job.node(1).second_way = True
    ask(job, answers, "accepted", silent=1.0)
    nodes = NodeWatch(job.state)
    nodes.look(time.monotonic())  # would need a running loop to ask anybody
    assert not job.node(1).probing
    assert job.node(1).role is Role.ACTIVE
    assert job.node(1).ask_again
    job.node(1).heard(time.monotonic())
    assert not job.node(1).ask_again, "its next silence is another one"


def test_a_node_that_falls_silent_while_it_is_asked_whether_it_can_be_asked(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe before the silence is no second way: another one is made."""
    job = Job(3, 0)
    asked = node_watch.probe

    async def probe(*where: Any) -> str:
        job.node(1).last_word -= 1.0
        return await asked(*where)

    monkeypatch.setattr(node_watch, "probe", probe)
    ask(job, answers, "unreachable")
    assert (job.node(1).role, job.node(1).turned_away) == (Role.ACTIVE, 0)


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


def test_a_supervisor_that_slept_blames_nobody(answers: list[str]) -> None:
    job = Job(3, 0)
    nodes = NodeWatch(job.state)
    now = time.monotonic()
    for index in range(3):
        job.node(index).second_way, job.node(index).last_word = True, now
    nodes.look(now)
    for node in job.state.nodes.values():
        node.last_word -= 60.0
    nodes.look(now + 60.0)  # would need a running loop to ask anybody
    assert not any(node.probing for node in job.state.nodes.values())


def test_a_sleep_of_our_own_is_no_steps_time() -> None:
    """The messages that had waited were heard first: the pause was learnt as the slowest step, and
    a hang was looked for after hours."""
    job = Job(2, 0)
    nodes, pace, now = NodeWatch(job.state), job.state.pace, time.monotonic()
    job.state.progress.best = 9
    pace.steps, pace.slowest, pace.last = 9, 0.5, now - 600.0
    for index in range(2):
        job.node(index).second_way, job.node(index).last_word = True, now - 600.0
    nodes.look(now - 600.0)
    nodes.woken()
    job.say(0, Report(1, (beat(0, 10, 10),)))
    assert job.state.progress.best == 10 and pace.slowest == 0.5


@pytest.mark.parametrize(("slept", "anew"), [(0.1, False), (1.0, True)])
def test_sigcont_shows_a_sleep_too_short_to_be_noticed_at_a_look(slept: float, anew: bool) -> None:
    """One of 1 s is less than SLEPT, but longer than a node may be silent."""
    assert slept < node_watch.SLEPT
    job, news = Job(3, 0), list[str]()
    job.state.on_news = news.append
    nodes = NodeWatch(job.state)
    for index in range(3):
        silent_nodes(job, index, since=slept)
    nodes.look(time.monotonic() - slept)
    nodes.continued()
    silent = [time.monotonic() - node.last_word for node in job.state.live()]
    assert all((seconds < slept) is anew for seconds in silent)
    assert (time.monotonic() - nodes.disturbed < slept) is anew
    assert [text.startswith("robust-srun was suspended for 1.0 s") for text in news] == [
        True
    ] * anew
