"""File systems that do not answer, as the supervisor sees them: what it says, how long it waits."""

from __future__ import annotations

import asyncio
import time

import pytest
from made_job import Job, Line, as_connection, hello, made_stalls
from waiting import idle

from srun_wrapper.agent import node_files
from srun_wrapper.detect.hang_watch import HangWatch
from srun_wrapper.detect.stalls import AGAIN, SETTLE
from srun_wrapper.protocol.messages import Inspect, Inspected, SlotActivity, Stalled

HOME = "/home"


class Told:
    """A job with three nodes, and what is said of it."""

    def __init__(self, **config: float) -> None:
        self.job = Job(3, 0, **config)
        self.said: list[str] = []
        self.stalls = made_stalls(self.job.state, self.said.append)
        self._numbers = 0

    def report(
        self, *nodes: int, mounts: tuple[str, ...] = (HOME,), starting: bool = False
    ) -> None:
        for node in nodes:
            self._numbers += 1
            message = Stalled(self._numbers, mounts, starting)
            self.job.inbox.message(as_connection(self.job.lines[node]), message)

    def look(self, after: float = 0.0) -> list[str]:
        """Return the words ``after`` so many seconds."""
        self.said.clear()
        self.stalls.look(time.monotonic() + after)
        return self.said


def test_it_is_said_once_for_all_nodes_and_again_now_and_then() -> None:
    told = Told()
    told.report(0, 2, starting=True)
    assert told.look() == []  # others may be about to report the same
    told.report(1)
    assert told.look(SETTLE) == [
        "processes cannot start on n[0-2]: file system /home does not answer; "
        "waiting for up to 600 s (stall_limit), no node is blamed for it"
    ]
    assert told.look(AGAIN - 1) == []
    (again,) = told.look(AGAIN + SETTLE)
    assert again.startswith(
        "processes cannot start on n[0-2]: file system /home does not answer si"
    )
    told.report(0, 1, 2, mounts=())
    assert told.look(30.0) == ["file system /home answers again on n[0-2] after 30 s"]
    assert told.look(90.0) == []


def test_a_stall_is_said_within_10_s() -> None:
    """The slowest way: no step, and all file systems were asked just before."""
    begun = max(node_files.SLOW, node_files.QUIET, node_files.AGAIN)
    assert begun + node_files.ANSWER + SETTLE <= 8.0  # and 2 s for messages and a busy machine


def test_each_file_system_is_named_with_its_nodes() -> None:
    told = Told()
    told.report(0)
    told.report(1, mounts=("/data",))
    first, second = told.look(SETTLE)
    assert first.startswith("ranks wait on n0: file system /home does not answer; ")
    assert second.startswith("ranks wait on n1: file system /data does not answer; ")


def test_a_short_stall_is_not_worth_a_line() -> None:
    told = Told()
    told.report(0)
    told.report(0, mounts=())
    assert told.look(SETTLE) == []


@pytest.mark.parametrize(("limit", "standing"), [(60.0, True), (0.0, False)])
def test_it_excuses_for_a_limited_time(limit: float, standing: bool) -> None:
    told = Told(stall_limit=limit)
    assert not told.stalls.standing()
    told.report(1)
    assert told.stalls.standing() is standing
    told.job.state.lose(told.job.node(1), "gone")
    assert not told.stalls.standing()


def test_each_file_system_has_its_own_time() -> None:
    """A file system that had been dead for longer took the second one's time away."""
    told = Told(stall_limit=60.0)
    told.report(1)
    node = told.job.node(1)
    node.stalled_at[HOME] -= 3600.0
    assert not told.stalls.standing()
    told.report(1, mounts=(HOME, "/data"))
    assert told.stalls.standing()
    home, data = told.look(SETTLE)
    assert "/home" in home and "/data" in data
    told.report(1)
    assert not told.stalls.standing()


def test_the_word_of_an_agent_that_died_is_forgotten() -> None:
    """The next one reports a stall that goes on, and none that is over."""
    told = Told(stall_limit=60.0)
    told.report(1)
    anew = hello(1)
    anew.life = 1
    told.job.inbox.message(as_connection(Line()), anew)
    assert not told.stalls.standing() and told.look(SETTLE) == []


@pytest.mark.parametrize(("limit", "came"), [(60.0, True), (0.05, False)])
def test_time_counts_anew_when_it_answers_again(limit: float, came: bool) -> None:
    told = Told(stall_limit=limit)
    told.report(0)
    ready: list[bool] = []

    async def scene() -> bool:
        waiting = asyncio.create_task(told.stalls.until(lambda: bool(ready), 1.0))
        await asyncio.wait([waiting], timeout=1.1)  # longer than it may take
        told.report(0, mounts=())
        await idle()
        ready.append(True)
        told.job.state.changed.set()
        return await waiting

    assert asyncio.run(scene()) is came


@pytest.mark.parametrize("elsewhere", [True, False])
def test_only_where_its_file_system_answers_elsewhere_is_a_node_that_waits_alone_to_blame(
    elsewhere: bool,
) -> None:
    """The others may not use it: then its server may be away, for which no node is reported."""
    job = Job(3, 0)
    job.say(0, Stalled(1, (HOME, "/logs"), False))

    async def inspect() -> None:
        asked = asyncio.create_task(HangWatch(job.state)._inspect())
        await asyncio.sleep(0)
        for node in range(3):
            samples = tuple(SlotActivity(local, "S", 0.0, 0) for local in range(2))
            well = ("/logs",) if node == 2 and elsewhere else ("/data",) if node else ("/logs",)
            job.say(node, Inspected(1, 1.0, samples, well))
        await asked

    asyncio.run(inspect())
    (failure,) = job.state.failures
    assert (failure.node, failure.shared) == ("n0", not elsewhere)
    mount, where = ("/logs", "answers on") if elsewhere else (HOME, "no other node uses it")
    assert f"file system {mount} has not answered" in failure.evidence[0]
    assert where in failure.evidence[0]
    assert job.node(0).own_mount == ("/logs" if elsewhere else "")


def test_an_inspection_is_not_repeated_on_a_new_connection() -> None:
    """The first one goes on: two debuggers at one rank would keep each other out."""
    job = Job(3, 0)

    async def inspect() -> None:
        asked = asyncio.create_task(HangWatch(job.state)._inspect())
        await asyncio.sleep(0)
        assert isinstance(job.lines[0].sent[-1], Inspect)
        assert not [order for order in job.join(0).sent if isinstance(order, Inspect)]
        asked.cancel()

    asyncio.run(inspect())
