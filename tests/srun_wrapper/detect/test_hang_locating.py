"""The early look at ranks that make no step: when it is due, what it says, what it does not do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import pytest
from made_job import Job, beat
from waiting import idle

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.detect import hang_watch, inspections
from srun_wrapper.detect.hang_watch import EARLY_WINDOW, HangWatch
from srun_wrapper.detect.rank_views import rank_views
from srun_wrapper.locate.locate import Located
from srun_wrapper.protocol.looking_messages import LAUNCHER, LOADER, RANK, Look, ThreadStack
from srun_wrapper.protocol.messages import Inspect, Inspected, Report, SlotActivity

REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3)", "<module> (train.py:9)")
SLEEP = ("augment (data.py:7)", "<module> (train.py:8)")
LOOP = ("get (queues.py:3)", "_worker_loop (worker.py:8)")


def look(
    stack: Sequence[str], role: str = RANK, rank: int = -1, local: int = -1, state: str = "S"
) -> Look:
    return Look(9, role, state, rank, local, (ThreadStack("main", tuple(stack)),))


def sample(local: int, *looks: Look, state: str = "S") -> SlotActivity:
    return SlotActivity(local, state, 0.0, 0, looks[0].main() if looks else (), False, looks)


class Watched:
    """Three nodes of two ranks each, that have made a step every half second until now."""

    def __init__(self, silent: float = 2.1) -> None:
        self.job = Job(3, 0)
        self.told: list[tuple[Located, Sequence[str]]] = []
        self.hang = HangWatch(
            self.job.state,
            mesh=lambda: {"dp": 6},
            tell=lambda located, lines, _silent: self.told.append((located, lines)),
        )
        pace, now = self.job.state.pace, time.monotonic()
        self.job.state.progress.best = 9
        pace.steps, pace.slowest, pace.last = 9, 0.5, now - silent
        pace.hang_limit = 10.0

    def passes(self, seconds: float) -> None:
        """Let so much time pass since the last step, as if the early look was that long ago."""
        self.job.state.pace.last -= seconds
        self.job.state.changed.set()  # the next look runs in another loop
        self.hang._looked_for = self.job.state.pace.last
        if self.hang._located is not None:
            self.hang._located = (self.hang._since(), *self.hang._located[1:])

    def asked(self) -> list[Inspect]:
        return [order for order in self.job.lines[0].sent if isinstance(order, Inspect)]

    async def answer(self, stuck: int = 3) -> None:
        """All nodes answer the last inspection; ``stuck``: the rank that is in no collective."""
        await asyncio.sleep(0)
        token = self.asked()[-1].token if self.asked() else 1
        for node in range(3):
            samples = tuple(
                sample(local, look(SLEEP if 2 * node + local == stuck else REDUCE))
                for local in range(2)
            )
            self.job.say(node, Inspected(token, EARLY_WINDOW, samples))
        await idle()

    def early(self, stuck: int = 3) -> None:
        async def scene() -> None:
            self.hang.look(time.monotonic())
            await self.answer(stuck)

        asyncio.run(scene())


def test_it_says_what_the_ranks_wait_for_and_does_nothing_else() -> None:
    w = Watched()
    w.early()
    ((located, lines),) = w.told
    assert (located.ranks, located.nodes) == ((3,), ("n1",))
    assert lines[1] == "rank 3 on n1: in augment (data.py:7) < <module> (train.py:8)"
    assert not w.job.state.failures
    assert [(order.window, order.ask) for order in w.asked()] == [(EARLY_WINDOW, False)]


def test_it_looks_once_until_there_is_a_step() -> None:
    w = Watched()

    async def scene() -> None:
        for _ in range(3):
            w.hang.look(time.monotonic())
            await w.answer()
        w.job.state.pace.last = time.monotonic() - 2.2  # a step, and none again
        w.hang.look(time.monotonic())
        await w.answer()

    asyncio.run(scene())
    assert len(w.asked()) == len(w.told) == 2


def test_nothing_clear_is_not_said() -> None:
    w = Watched()
    w.early(stuck=-1)
    assert w.asked() and not w.told


@pytest.mark.parametrize(
    "why", ["soon", "slow", "start-up", "phase", "ending", "excused", "off", "no step"]
)
def test_when_it_does_not_look(why: str) -> None:
    w = Watched(1.0 if why == "soon" else 2.1)
    state, now = w.job.state, time.monotonic()
    if why == "slow":
        state.pace.slowest = 1.0
    elif why == "start-up":
        state.pace.steps = 1
    elif why == "phase":
        state.pace.in_phase("eval", state.pace.last, now)
        state.pace.phases["eval"] = 0.1
    elif why == "ending":
        w.job.say(1, Report(1, (beat(1, 9, 9, ended=True),)))
        state.pace.last = now - 2.1
    elif why == "excused":
        w.hang = HangWatch(state, lambda: True)
    elif why == "off":
        state.config = state.config.__class__(hang=False)
        w.hang = HangWatch(state)
    elif why == "no step":
        state.progress.best, state.pace.slowest = None, 0.0
    w.early()
    assert not w.asked() and not w.told


def test_ranks_of_which_nothing_is_known_may_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that broke for a second, while rank 0 evaluated, ended a healthy job."""
    w = Watched()
    pace = w.job.state.pace
    pace.last = time.monotonic() - (pace.limit() + 1.0)
    monkeypatch.setattr(inspections, "REPLY", 0.0)
    monkeypatch.setattr(hang_watch, "WINDOW", 0.2)

    async def inspected() -> int:
        looking = asyncio.create_task(w.hang._inspect())
        await asyncio.sleep(0)
        for node in (1, 2):
            quiet = tuple(sample(local, look(REDUCE)) for local in range(2))
            w.job.say(node, Inspected(w.asked()[-1].token, 0.2, quiet))
        await looking
        return len(w.job.state.failures)

    async def life() -> list[int]:
        return [await inspected() for _ in range(hang_watch.PARTIAL)]

    assert asyncio.run(life()) == [0] * (hang_watch.PARTIAL - 1) + [1]
    assert w.job.state.failures[0].symptom == "hang"


def test_a_step_that_comes_meanwhile_is_no_hang() -> None:
    w = Watched()

    async def scene() -> None:
        w.hang.look(time.monotonic())
        await asyncio.sleep(0)
        w.job.state.pace.last = time.monotonic()
        await w.answer()

    asyncio.run(scene())
    assert w.asked() and not w.told


@pytest.mark.parametrize("still", [True, False], ids=["seen again", "seen early only"])
def test_the_failure_names_what_was_located(still: bool) -> None:
    w = Watched()
    w.early()
    w.passes(20.0)

    async def scene() -> None:
        w.hang.look(time.monotonic())
        await w.answer(3 if still else -1)

    asyncio.run(scene())
    (failure,) = w.job.state.failures
    assert (failure.symptom, failure.rank, failure.node) == ("hang", 3, "n1")
    assert failure.suspects == ()
    assert "no rank did anything" in failure.evidence[0]
    assert "rank 3 is in no collective" in failure.evidence[1]


@pytest.mark.parametrize("why", ["max_restarts is 0", "--mpi=pmix: not in this step"])
def test_a_hang_that_would_end_the_job_is_told_once_and_left_alone(why: str) -> None:
    """Under --mpi=pmix, with input that is used up, or with max_restarts = 0: srun would wait."""
    w = Watched(20.0)
    if why == "max_restarts is 0":
        w.job.state.config = w.job.state.config.__class__(max_restarts=0)
    else:
        w.hang._hindered = lambda: why
    w.early()
    w.hang._next = 0.0
    w.early()
    assert len(w.asked()) == 2 and not w.job.state.failures
    ((located, lines),) = w.told
    assert located.ranks == (3,)
    assert lines[0] == f"no rank did anything for 20 s; nothing is done: {why}"
    assert lines[2] == "rank 3 on n1: in augment (data.py:7) < <module> (train.py:8)"
    since, note = w.job.state.waits
    assert since == w.job.state.pace.last
    assert note.startswith("no step for 20 s: no rank did anything for 20 s; nothing is done: ")


def test_robust_status_shows_what_is_waited_for_before_a_hang_is_one() -> None:
    w = Watched(20.0)
    w.job.state.pace.hang_limit = 60.0
    w.hang._stall, w.hang._recorders_next = w.hang._since(), math.inf  # they have been read
    w.early()
    assert not w.job.state.failures and not w.told
    assert w.job.state.waits[1].startswith("no step for 20 s: no sign of work for 20 s; rank 3 is")


def test_stopped_ranks_are_looked_for_though_a_step_took_long_once() -> None:
    w = Watched(31.0)
    w.job.state.pace.slowest = 200.0
    w.early()
    assert [order.window for order in w.asked()] == [1.0]


def test_a_location_from_before_a_phase_says_nothing_about_a_hang_inside_it() -> None:
    w = Watched()
    w.early()
    w.passes(40.0)
    now = time.monotonic()
    w.job.state.pace.phases["save"] = 0.1
    w.job.state.pace.in_phase("save", now - 30.0, now)

    async def scene() -> None:
        w.hang.look(time.monotonic())
        await w.answer(-1)

    asyncio.run(scene())
    (failure,) = w.job.state.failures
    assert (failure.symptom, failure.rank, failure.suspects) == ("hang", None, ())


def test_a_wait_for_data_is_no_fault_of_the_node_that_waits() -> None:
    """Rank 3 waits for its batch, and all others for it."""
    w = Watched()
    pace, now = w.job.state.pace, time.monotonic()
    pace.last = now - pace.start_limit - 2.0
    pace.in_phase(DATA_WAIT, now - pace.start_limit - 1.0, now)
    w.early()
    (failure,) = w.job.state.failures
    assert failure.evidence[0].startswith("phase 'data wait': no rank did anything for 1801 s")
    assert (failure.symptom, failure.node, failure.rank, failure.suspects) == ("hang", "", None, ())
    assert not w.told


def test_a_slip_of_ours_silences_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(*_: object) -> Located:
        raise ZeroDivisionError

    monkeypatch.setattr(hang_watch, "locate", slip)
    w = Watched(25.0)
    w.early()
    (failure,) = w.job.state.failures
    assert (failure.symptom, failure.suspects) == ("hang", ())


# -- the ranks, as the nodes describe them


def test_torchruns_ranks_have_their_own_numbers_and_steps() -> None:
    job = Job(2, 0)
    job.state.members.lay_out(job.state.world.places, [(0,), (1,)])
    job.state.new_epoch()
    job.say(1, Report(1, (beat(0, 7, 7), beat(1, 6, 6))))
    slot = sample(
        0,
        look(REDUCE, rank=2, local=0),
        look(SLEEP, rank=3, local=1),
        look(SLEEP, rank=-1),
        look(("poll (a.py:1)",), LAUNCHER, 1),
        look(LOOP, LOADER, 3),
    )
    first, second = rank_views(job.state.world, [(job.node(1), (slot,))])
    assert (first.rank, first.node, first.step, first.loaders) == (2, "n1", 7, ())
    assert (second.rank, second.step, second.loaders) == (3, 6, ((9, LOOP),))


def test_other_ranks_have_those_of_their_slots() -> None:
    job = Job(2, 0)
    slots = (sample(0, look(SLEEP, rank=77)), sample(1, state="T"), sample(5, look(SLEEP)))
    found = rank_views(job.state.world, [(job.node(1), slots)])
    assert [(view.rank, view.state, view.stack) for view in found] == [
        (2, "S", SLEEP),
        (3, "T", ()),
    ]


def test_what_the_kernel_shows_of_a_rank_and_its_loader() -> None:
    job = Job(2, 0)
    rank, worker, other = look(SLEEP, rank=3), look(LOOP, LOADER, 3), look(LOOP, LOADER, 3)
    rank.kernel = "waits for /data/a in state D"
    worker.pid, worker.kernel = 12, "waits for /data/b in state D"
    (view,) = rank_views(job.state.world, [(job.node(1), (sample(1, rank, other, worker),))])
    assert view.kernel == f"{rank.kernel}; its data-loader worker 12 {worker.kernel}"
    rank.kernel = ""
    (view,) = rank_views(job.state.world, [(job.node(1), (sample(1, rank, other, worker),))])
    assert view.kernel == f"its data-loader worker 12 {worker.kernel}"
