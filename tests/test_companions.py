"""Nodes of the standby partition, with real processes in place of srun."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from srun_wrapper import companions, steps
from srun_wrapper.companions import Companions
from srun_wrapper.roster import Role
from srun_wrapper.state import JobState

BUSY = "import sys; sys.exit(1)"
WAITS = "import time; time.sleep(60)"


class Boss:
    """As much of the supervisor as they see; ``asked`` has the nodes that srun was to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config(standby_wait=5.0)
        self.state = JobState(self.config, 7, "n0")
        self.events: list[str] = []
        self.ledger = SimpleNamespace(event=lambda name, **_more: self.events.append(name))
        self.env: dict[str, str] = {}
        self.launch = SimpleNamespace(options=None, command=SimpleNamespace(command=()))
        self.step = SimpleNamespace(ended=False)
        self.best: dict[str, str] = {}
        self.neighbours = SimpleNamespace(prefer=lambda _lost, _idle: self.best)
        job = SimpleNamespace(id=7, end_time=None)
        partition = SimpleNamespace(max_time_s=None)
        self.slurm = SimpleNamespace(
            job=lambda _id: job, partitions=lambda: {"standby": partition}, nodes=dict
        )
        self.asked: list[list[str]] = []
        self.sruns: list[asyncio.subprocess.Process] = []
        self.srun = WAITS
        self.on_start: Callable[[int], Awaitable[None]] | None = None  # it gets how many were asked

        async def start(argv: list[str], env: Any, **_more: Any) -> asyncio.subprocess.Process:
            self.asked.append([word for word in argv if word.startswith("--")])
            code = BUSY if any("--nodelist" in word for word in argv) else self.srun
            if self.on_start is not None:
                await self.on_start(len(self.asked))
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
            self.sruns.append(process)
            return process

        def argv(_l: Any, _j: Any, _p: Any, tasks: int, without: list[str], _m: int) -> list[str]:
            return ["srun", f"--ntasks={tasks}", *(f"--exclude={name}" for name in without)]

        monkeypatch.setattr(companions, "END", 0.2)
        monkeypatch.setattr(steps, "start", start)
        monkeypatch.setattr(steps, "companion_argv", argv)
        monkeypatch.setattr(steps, "task_argv", lambda *_words: [])
        self.companions = Companions(self, SimpleNamespace(env=lambda _n: {}), [])  # type: ignore[arg-type]

    async def chatter(self, words: int = 20) -> None:
        """Agents of other nodes say something."""
        for _ in range(words):
            self.state.changed.set()
            await asyncio.sleep(0)

    def comes(self, number: int) -> None:
        """The agent of a companion says hello."""
        node = SimpleNamespace(
            companion=number, role=Role.SPARE, connection=SimpleNamespace(send=lambda _m: None),
            slots=8, name=f"s{number}",
        )  # fmt: skip
        self.state.nodes[(number, "0", 0)] = node  # type: ignore[assignment]
        self.state.changed.set()


@pytest.fixture
def boss(monkeypatch: pytest.MonkeyPatch) -> Iterator[Boss]:
    yield Boss(monkeypatch)


def play(boss: Boss, scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scene()
        finally:
            await boss.companions.close()
            for process in boss.sruns:  # none is left
                await asyncio.wait_for(process.wait(), 10.0)

    asyncio.run(whole())


async def asked(boss: Boss, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while len(boss.asked) < count:
        assert asyncio.get_running_loop().time() < deadline, boss.asked
        await asyncio.sleep(0.01)


async def srun_count(boss: Boss, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while len(boss.sruns) < count:
        assert asyncio.get_running_loop().time() < deadline, boss.asked
        await asyncio.sleep(0.01)


def test_one_that_was_asked_for_early_is_used(boss: Boss) -> None:
    async def scene() -> None:
        for _ in range(3):  # the watch says it again and again
            boss.companions.expect([(2, "n2")], ["n2"])
            await asyncio.sleep(0)
        await asked(boss, 1)
        boss.comes(1)
        came = await boss.companions.take({1: (2, "n2")})
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        assert boss.asked == [["--ntasks=2", "--exclude=n2"]]
        boss.companions.expect([], [])  # what is in use stays
        assert boss.events == ["companions_asked"]

    play(boss, scene)


def test_one_that_is_not_needed_is_given_back(boss: Boss) -> None:
    async def scene() -> None:
        boss.companions.expect([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        (companion,) = boss.companions._companions.values()
        boss.companions.expect([], [])
        assert companion.process is not None
        assert await asyncio.wait_for(companion.process.wait(), 10.0) < 0
        assert boss.state.nodes[(1, "0", 0)].role is Role.LOST and not boss.state.awaited
        assert boss.events == ["companions_asked", "companion_sent_away"]

    play(boss, scene)


def test_a_larger_place_needs_another(boss: Boss) -> None:
    async def scene() -> None:
        boss.companions.expect([(2, "n2")], ["n2"])
        await asked(boss, 1)

        async def come() -> None:
            await asked(boss, 2)
            boss.comes(2)

        coming = asyncio.create_task(come())
        came = await boss.companions.take({3: (8, "n5")})
        await coming
        assert [node.name for node in came.values()] == ["s2"]
        assert boss.asked[1] == ["--ntasks=8"]

    play(boss, scene)


def test_the_node_that_suits_best_is_taken_by_another_job(boss: Boss) -> None:
    """Then any node of the partition will do."""

    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def come() -> None:
            await asked(boss, 2)
            boss.comes(1)

        coming = asyncio.create_task(come())
        came = await boss.companions.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert boss.asked == [
            ["--nodelist=s9", f"--immediate={companions.AT_ONCE}", "--ntasks=2"],
            ["--ntasks=2"],
        ]

    play(boss, scene)


def test_refused(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.srun = BUSY
        assert await boss.companions.take({1: (2, "n2")}) == {}
        assert not boss.state.awaited

    play(boss, scene)
    assert "partition standby gave 0 of 1 nodes" in capfd.readouterr().err


def test_no_such_partition(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.slurm.partitions = dict
        boss.companions.expect([(2, "n2")], ["n2"])
        assert await boss.companions.take({1: (2, "n2")}) == {}

    play(boss, scene)
    assert "no partition 'standby'" in capfd.readouterr().err
    assert boss.asked == []


def test_messages_while_any_other_node_is_asked_for(boss: Boss) -> None:
    """The one that suits best is gone; what is heard of others ends nothing."""

    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                await boss.chatter()

        boss.on_start = start

        async def come() -> None:
            while len(boss.sruns) < 2:
                await boss.chatter()
            boss.comes(1)

        coming = asyncio.create_task(come())
        came = await boss.companions.take({1: (2, "n2")})
        await coming
        assert [node.name for node in came.values()] == ["s1"]
        assert boss.sruns[1].returncode is None

    play(boss, scene)


def test_dropped_while_any_other_node_is_asked_for(boss: Boss) -> None:
    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                boss.state.signalled = 15
                await boss.chatter()
                assert not boss.companions._companions  # take has given up

        boss.on_start = start
        assert await boss.companions.take({1: (2, "n2")}) == {}
        await srun_count(boss, 2)
        assert await asyncio.wait_for(boss.sruns[1].wait(), 10.0) < 0
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)


def test_dropped_while_it_is_asked_for(boss: Boss) -> None:
    async def scene() -> None:
        async def start(_count: int) -> None:
            boss.companions.send_away()

        boss.on_start = start
        boss.companions.expect([(2, "n2")], ["n2"])
        await srun_count(boss, 1)
        assert await asyncio.wait_for(boss.sruns[0].wait(), 10.0) < 0
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)


def test_srun_cannot_be_run_a_second_time(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        boss.best = {"n2": "s9"}

        async def start(count: int) -> None:
            if count == 2:
                raise OSError("no more processes")

        boss.on_start = start
        assert await boss.companions.take({1: (2, "n2")}) == {}
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)
    assert "cannot run srun for a standby node: no more processes" in capfd.readouterr().err


def test_its_node_died_while_it_waited(boss: Boss) -> None:
    """Another one is asked for, as early as before."""

    async def scene() -> None:
        boss.companions.expect([(2, "n2")], ["n2"])
        await asked(boss, 1)
        boss.comes(1)
        boss.state.nodes[(1, "0", 0)].role = Role.LOST
        boss.companions._next_ask = 0.0
        assert boss.companions._asking is not None
        await boss.companions._asking  # while it asks, no other is asked for
        boss.companions.expect([(2, "n2")], ["n2"])
        await asked(boss, 2)
        boss.comes(2)
        came = await boss.companions.take({1: (2, "n2")})
        assert [node.name for node in came.values()] == ["s2"]
        assert len(boss.asked) == 2

    play(boss, scene)


def test_its_node_dies_while_another_is_awaited(boss: Boss) -> None:
    """It is not waited for any longer than its srun would be."""

    async def scene() -> None:
        boss.companions._config = Config(standby_wait=60.0)

        async def come_and_go() -> None:
            await srun_count(boss, 2)
            boss.comes(1)
            boss.state.nodes[(1, "0", 0)].role = Role.LOST
            boss.state.changed.set()

        coming = asyncio.create_task(come_and_go())
        taken = boss.companions.take({1: (2, "n2"), 2: (2, "n3")})
        assert await asyncio.wait_for(taken, 20.0) == {}
        await coming

    play(boss, scene)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["Resources", "Priority"], "(none became free)"),
        ([], "(none became free)"),
        (None, "(Slurm does not say why)"),
        (["QOSMaxNodePerUserLimit", "Priority"], "(Slurm's reason: QOSMaxNodePerUserLimit)"),
    ],
)
def test_why_none_came_in_time(
    boss: Boss, capfd: pytest.CaptureFixture[str], reasons: list[str] | None, said: str
) -> None:
    """As Slurm says it of what we have asked for."""

    def waiting(name: str) -> set[str]:
        if reasons is None:
            raise SlurmError("unreachable", ("squeue",), "no slurmctld answers")
        return set(reasons if name == "robust-standby-7" else ["Held"])

    async def scene() -> None:
        boss.companions._config = Config(standby_wait=0.2)
        boss.slurm.waiting_reasons = waiting
        assert await boss.companions.take({1: (2, "n2")}) == {}

    play(boss, scene)
    assert f"gave 0 of 1 nodes within 0.2 s {said}" in capfd.readouterr().err


def test_the_step_ends_meanwhile(boss: Boss, capfd: pytest.CaptureFixture[str]) -> None:
    """Someone cancels it: nothing is waited for, and nothing blamed on the partition."""

    async def scene() -> None:
        boss.companions._config = Config(standby_wait=60.0)

        async def cancel() -> None:
            await srun_count(boss, 1)
            boss.step.ended = True
            boss.state.changed.set()

        cancelling = asyncio.create_task(cancel())
        taken = boss.companions.take({1: (2, "n2")})
        assert await asyncio.wait_for(taken, 20.0) == {}
        await cancelling
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)
    assert "gave 0 of" not in capfd.readouterr().err


def test_a_failure_meanwhile_keeps_the_place_in_the_queue(boss: Boss) -> None:
    async def scene() -> None:
        async def fail() -> None:
            await srun_count(boss, 2)
            boss.comes(1)
            boss.state.failures.append(None)  # type: ignore[arg-type]
            boss.state.changed.set()

        failing = asyncio.create_task(fail())
        came = await boss.companions.take({1: (2, "n2"), 2: (2, "n3")})
        await failing
        assert {place: node.name for place, node in came.items()} == {1: "s1"}
        boss.state.nodes[(1, "0", 0)].role = Role.ACTIVE  # as its place is filled
        boss.state.failures.clear()
        assert boss.state.awaited >= {2}
        boss.comes(2)
        again = await boss.companions.take({2: (2, "n3")})
        assert {place: node.name for place, node in again.items()} == {2: "s2"}
        assert len(boss.asked) == 2
        assert [process.returncode for process in boss.sruns] == [None, None]

    play(boss, scene)


def test_what_a_failure_left_over_is_sent_away(boss: Boss) -> None:
    async def scene() -> None:
        boss.state.failures.append(None)  # type: ignore[arg-type]
        assert await boss.companions.take({1: (2, "n2")}) == {}
        assert boss.sruns[0].returncode is None
        boss.companions.expect([], [])
        assert await asyncio.wait_for(boss.sruns[0].wait(), 10.0) < 0
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)


def test_closed_while_it_is_asked_for(boss: Boss) -> None:
    """Nothing is started any more."""

    async def scene() -> None:
        hurdle = asyncio.Event()

        async def start(count: int) -> None:
            if count == 2:
                await hurdle.wait()

        boss.on_start = start
        boss.companions.expect([(2, "n2"), (2, "n3")], ["n2", "n3"])
        await asked(boss, 2)
        await boss.companions.close()
        hurdle.set()
        await boss.chatter()
        assert len(boss.sruns) == 1
        assert not boss.companions._companions and not boss.state.awaited

    play(boss, scene)


def test_a_slip_while_asking_does_not_end_the_job(
    boss: Boss, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        boss.slurm.partitions = lambda: 1 // 0
        boss.companions.expect([(2, "n2")], ["n2"])
        assert await boss.companions.take({1: (2, "n2")}) == {}

    play(boss, scene)
    said = capfd.readouterr().err
    assert said.count("robust-srun: internal error while asking for a node: ZeroDivision") == 1
