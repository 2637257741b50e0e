"""Silent nodes: which answers of the second way make a loss."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job

from robust_slurm.config import Config
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.detect import node_watch
from srun_wrapper.detect.node_watch import BROKEN, UNANSWERED, NodeWatch
from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Finish, Report, Stop
from srun_wrapper.recover.standby import prerequest
from srun_wrapper.recover.standby.prerequest import Prerequest
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES

MUTE = Config().mute_limit


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


def ask(job: Job, answers: list[str], *given: str, silent: float = 0.0) -> list[str]:
    """Look at one node of three until all these answers were given; the news meanwhile."""
    news: list[str] = []
    job.state.on_news = news.append
    node = job.node(1)
    answers[:] = given
    for other in (job.node(0), job.node(2)):
        other.second_way, other.last_word = True, time.monotonic() + 60.0

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
    job = Job(3, 0)
    job.node(1).second_way = second_way
    news = ask(job, answers, *given, silent=silent)
    assert (job.node(1).role is Role.DEAD) is lost
    assert [f.symptom for f in job.state.failures] == ["node_lost"] * lost
    assert len(news) == lost


def test_after_an_outage_an_agent_has_time_to_connect_anew(answers: list[str]) -> None:
    """Its host answers before it does; that it was silent until then says nothing."""
    job = Job(3, 0, outage_wait=600.0)
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


# -- suspicion: standby nodes are requested before a node is proven to be lost


class Prerequested:
    """The real Prerequest, and the nodes for which it would request others."""

    def __init__(self, job: Job) -> None:
        self.watch, self.ended = NodeWatch(job.state), False
        requests: Any = SimpleNamespace(prerequest=self._prerequest)
        self._parts = Prerequest(
            job.state.members,
            requests,
            self.watch,
            lambda: job.state.signalled > 0 or self.ended,
        )
        self._suspects: list[str] = []

    def _prerequest(self, _wanted: Any, suspects: list[str]) -> None:
        self._suspects = suspects

    def now(self) -> list[str]:
        self._parts.for_doubtful(time.monotonic())
        return self._suspects


def test_nodes_that_lack_are_asked_for_ever_more_rarely() -> None:
    """A request waits in Slurm's queue for days; one that Slurm refuses is told in the output."""
    job = Job(3, 0)
    asked: list[Any] = []
    lacking, clock = [1], [time.monotonic()]
    requests: Any = SimpleNamespace(prerequest=lambda wanted, _suspects: asked.append(wanted))
    parts = Prerequest(
        job.state.members, requests, NodeWatch(job.state), lambda: False, lambda: lacking
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prerequest, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        for _ in range(3600):
            clock[0] += 1.0
            parts.for_vacant()
        assert 10 < len(asked) < 25 and asked[0] == [(1, "")]
        lacking.clear()
        parts.for_vacant()
    assert asked[-1] == []  # at once: the requests are withdrawn


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
    job = Job(2, 0, standby_partition="standby")
    requested, node = Prerequested(job), job.node(1)
    heard(job)
    assert requested.now() == []
    for name, value in trouble.items():
        ago = name in ("last_word", "asked_at", "closed_at")
        setattr(node, name, time.monotonic() - value if ago else value)
    assert requested.now() == [node.name] * doubted
    node.last_word, node.closed_at = time.monotonic(), None
    assert requested.now() == []


def test_nobody_is_asked_for_when_the_step_is_being_ended() -> None:
    job = Job(2, 0, standby_partition="standby")
    requested = Prerequested(job)
    heard(job)
    job.node(1).last_word -= 5.0
    assert requested.now()
    requested.ended = True
    assert not requested.now()
    requested.ended, job.state.signalled = False, 15
    assert not requested.now()


def test_a_request_stays_while_a_shared_cause_is_only_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Withdrawn and made again, it would preempt two jobs of others for one node."""
    job = Job(2, 0, standby_partition="standby")
    requested, seen = Prerequested(job), {"suspected": False, "shared": False}
    monkeypatch.setattr(requested.watch, "is_shared", lambda: seen["shared"])
    monkeypatch.setattr(requested.watch, "seems_shared", lambda _now: any(seen.values()))
    heard(job)
    job.node(1).last_word -= 5.0
    seen["suspected"] = True
    assert requested.now() == []  # nothing new is asked for
    seen["suspected"] = False
    assert requested.now() == ["n1"]
    seen["suspected"] = True
    assert requested.now() == ["n1"]
    seen["shared"] = True
    assert requested.now() == []


def test_more_silent_nodes_than_can_be_replaced() -> None:
    job = Job(MAX_STANDBY_NODES + 1, 0, standby_partition="standby")
    requested = Prerequested(job)
    heard(job)
    for index in range(MAX_STANDBY_NODES):
        job.node(index).last_word -= 5.0
    assert len(requested.now()) == MAX_STANDBY_NODES
    job.node(MAX_STANDBY_NODES).last_word -= 5.0
    assert requested.now() == []


# -- shared causes


def silent_nodes(job: Job, *indexes: int, since: float = 1.0) -> None:
    for index in indexes:
        node = job.node(index)
        node.second_way, node.last_word = True, time.monotonic() - since


def watch_for(job: Job, seconds: float, nodes: NodeWatch) -> None:
    async def look() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            job.node(0).second_way, job.node(0).last_word = True, time.monotonic()
            nodes.look(time.monotonic())
            await asyncio.sleep(0.02)

    asyncio.run(look())


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe(*_where: object) -> str:
        await asyncio.sleep(0.01)
        return "unreachable"

    monkeypatch.setattr(node_watch, "probe", probe)
    monkeypatch.setattr(node_watch, "UNANSWERED", 0.0)


def test_many_unreachable_nodes_are_waited_for_and_replaced_without_a_report(
    unreachable: None,
) -> None:
    job, told = Job(6, 0, outage_wait=0.8), list[tuple[str, bool]]()
    nodes = NodeWatch(job.state, on_shared=lambda text, begins: told.append((text, begins)))
    silent_nodes(job, 2, 3, 4, 5)
    silent_nodes(job, 1, since=0.0)
    job.node(1).last_word += 60.0
    watch_for(job, 0.3, nodes)
    assert nodes.waiting() and not job.state.failures
    ((text, begins),) = told
    assert begins and text.startswith("n[2-5] cannot be reached (4 of 6 nodes): a shared cause")
    watch_for(job, 1.0, nodes)
    assert not nodes.waiting()
    found = job.state.failures
    assert [f.node for f in found] == ["n2", "n3", "n4", "n5"] and all(f.shared for f in found)
    assert len(told) == 2 and "not reported as bad" in told[1][0]
    diagnosis = diagnose(found)
    assert (diagnosis.cause, diagnosis.suspects) == ("shared", ())
    assert diagnosis.unreported == {"n2", "n3", "n4", "n5"}


def test_nodes_that_answer_again_in_time_are_kept(unreachable: None) -> None:
    job, told = Job(4, 0), list[tuple[str, bool]]()
    nodes = NodeWatch(job.state, on_shared=lambda text, begins: told.append((text, begins)))
    silent_nodes(job, 1, 2, 3)
    watch_for(job, 0.3, nodes)
    assert nodes.waiting()
    job.state.pace.last, began = 0.0, time.monotonic()
    watch_for(job, 0.05, nodes)
    assert job.state.pace.last >= began  # no step could be made: that is no hang
    for index in range(4):
        job.say(index, Report(1, ()))
    watch_for(job, 0.05, nodes)
    assert not nodes.waiting() and not job.state.failures
    assert len(told) == 2 and "is over after" in told[1][0]


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


def test_a_node_that_was_given_up_for_its_silence_is_taken_back() -> None:
    job, back = Job(3, 1), list[str]()
    job.state.on_back = lambda node: back.append(node.name)
    for index in (1, 2, 3):
        job.state.lose_silent(job.node(index), "no word", shared=False)
    assert job.state.vacant() == ("n1", "n2") and len(job.state.failures) == 2
    job.state.members.stop_epoch()  # the recovery has begun: the ranks of the others are stopped
    job.say(1, Report(1, ()))  # its kernel still had that to send: only a new connection counts
    assert job.lines[1].closed and job.node(1).role is Role.DEAD
    lines = [job.join(index, 1) for index in (1, 2, 3)]
    assert back == ["n1", "n2", "n3"] and not job.state.failures and not job.state.vacant()
    assert [job.node(i).role for i in (1, 2, 3)] == [Role.ACTIVE, Role.ACTIVE, Role.SPARE]
    for line in lines[:2]:
        assert any(isinstance(m, Stop) and m.epoch == 1 for m in line.sent)
        assert not any(isinstance(m, Finish) for m in line.sent)


def test_a_lost_node_whose_place_is_filled_stays_lost() -> None:
    job = Job(2, 1)
    job.state.lose_silent(job.node(1), "no word", shared=False)
    job.state.world.places[1] = job.node(2)
    assert any(isinstance(m, Finish) for m in job.join(1, 1).sent)
    assert job.node(1).role is Role.DEAD
