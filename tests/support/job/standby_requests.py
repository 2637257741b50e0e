"""StandbyNodes for tests, with real processes in place of srun."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_job import KeptJournal, made_launch

from robust_slurm.config import Config
from robust_slurm.slurm import Slurm
from srun_wrapper.command import steps
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.recover.standby import asking as standby_asking
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.recover.standby.nodes import StandbyNodes
from srun_wrapper.recover.standby.request import Barred, Requester
from srun_wrapper.requeue.slurm_wait import SlurmWait

BUSY = "import sys; sys.exit(1)"
WAITS = "import time; time.sleep(60)"


class StandbyJob:
    """The parts of StandbyNodes; ``asked`` lists the nodes that srun was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config(standby_wait=5.0)
        self.state = JobState(self.config, 7, "n0")
        self.journal = KeptJournal()
        self.ended = False  # the job's srun
        self.best: dict[str, str] = {}
        job = SimpleNamespace(id=7, end_time=None)
        partition = SimpleNamespace(max_time_s=None)
        self.slurm = SimpleNamespace(
            job=lambda _id: job, partitions=lambda: {"standby": partition}, nodes=dict,
            allotted=lambda _name: [],
        )  # fmt: skip
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

        monkeypatch.setattr(standby_asking, "END", 0.2)
        monkeypatch.setattr(steps, "start", start)
        monkeypatch.setattr(steps, "standby_argv", argv)
        monkeypatch.setattr(steps, "task_argv", lambda *_words: [])
        self.said: list[str] = []
        self.wait = SlurmWait(900.0, lambda: False, self.said.append)
        slurm = cast(Slurm, self.slurm)
        requester = Requester(
            made_launch(), steps.Secrets(b"", 1), slurm, lambda _lost, _idle: self.best
        )
        self.requests = StandbyRequests(self.state, requester, self.wait, self.journal, Barred([]))
        self.standby = StandbyNodes(self.state, self.requests, self._is_over)

    def _is_over(self) -> bool:
        return bool(self.state.failures) or self.state.signalled > 0 or self.ended

    @property
    def events(self) -> list[str]:
        """Return the names of the recorded events."""
        return [name for name, _ in self.journal.events]

    async def chatter(self, words: int = 20) -> None:
        """Have agents of other nodes send a message."""
        for _ in range(words):
            self.state.changed.set()
            await asyncio.sleep(0)

    def comes(self, number: int) -> None:
        """Have the agent of a standby node send its hello."""
        key, name = (number, "0", 0), f"s{number}"
        hello = Hello(number, "0", 0, name, tuple(range(8)), 1, 8, 7000, 7001, number, 0, 0)
        line: Any = SimpleNamespace(send=lambda _m: None)
        node = Node(
            key, name, "10.0.0.9", hello, line, Role.SPARE, 0.0, 7001, standby_request=number
        )
        self.state.members.nodes[key] = node
        self.state.changed.set()


@pytest.fixture
def standby_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandbyJob]:
    yield StandbyJob(monkeypatch)


def play(standby_job: StandbyJob, scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scene()
        finally:
            await standby_job.requests.close()
            for process in standby_job.sruns:  # none is left
                await asyncio.wait_for(process.wait(), 10.0)

    asyncio.run(whole())


async def asked(standby_job: StandbyJob, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while len(standby_job.asked) < count:
        assert asyncio.get_running_loop().time() < deadline, standby_job.asked
        await asyncio.sleep(0.01)


async def srun_count(standby_job: StandbyJob, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while len(standby_job.sruns) < count:
        assert asyncio.get_running_loop().time() < deadline, standby_job.asked
        await asyncio.sleep(0.01)
