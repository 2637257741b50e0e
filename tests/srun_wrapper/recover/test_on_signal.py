"""A requeue on a signal: when it is asked for, its order, and what speaks against it."""

from __future__ import annotations

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job

from srun_wrapper.checkpoints import flushing
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.protocol.messages import Exited, Signalled
from srun_wrapper.recover import on_signal
from srun_wrapper.recover.on_signal import SignalledRequeue

USR2, TERM = int(signal.SIGUSR2), int(signal.SIGTERM)


class Asked:
    """The part under test, with a job of two nodes and parts that note what they are told."""

    def __init__(self, signals: str = "USR2,TERM") -> None:
        self.job = Job(2, 0, requeue_on=signals)
        self.state = self.job.state
        self.number = 0  # of the last event
        self.done: list[Any] = []
        self.shown: list[Any] = []  # by Slurm; the last one from then on
        self.error = ""
        self.phase = Phase()
        rung: Any = SimpleNamespace(read_job=self.look, requeue=self.put_back)
        flush: Any = SimpleNamespace(flush=self.flush)
        stopping: Any = SimpleNamespace(end_ranks=self.end_ranks)
        self.part = SignalledRequeue(self.state, stopping, flush, rung, self.phase)
        self.show()
        self.state.progress.beats = 1

    def show(self, **changes: Any) -> None:
        values = {"restarts": 0, "state": "RUNNING", "running": True, "reason": None}
        values |= {"batch": True}
        self.shown.append(SimpleNamespace(**{**values, "end_time": time.time() + 120, **changes}))

    async def look(self) -> Any:
        self.done.append("look")
        return self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]

    async def put_back(self, *, standby: bool) -> str:
        assert not standby, "no node is lost"
        self.done.append("requeue")
        return self.error

    async def flush(self, limit: float) -> None:
        self.done.append(("flush", round(limit, -1)))

    async def end_ranks(self, nodes: list[Any], _over: object) -> None:
        self.done.append(("end", len(nodes)))

    def get(self, signum: int = USR2) -> None:
        """Receive the signal as Slurm sends it: by the shims of all nodes."""
        self.number += 1
        for index in (0, 1):
            self.job.say(index, Signalled(self.number, signum))
        self.state.note_ending(lambda _node: True)

    def end(self, *, code: int | None = None, signum: int | None = USR2) -> None:
        for local in (0, 1):
            self.number += 1
            for index in (0, 1):
                self.job.say(index, Exited(self.number, 1, local, code, signum, 0.0, ""))

    def requeue(self, over: bool = False) -> bool:
        return asyncio.run(self.part.requeue(lambda: over))


@pytest.mark.parametrize(
    ("signals", "came", "asked"),
    [
        ("", (USR2,), 0),
        ("USR2", (), 0),
        ("USR2", (USR2,), USR2),
        ("USR2", (TERM,), 0),
        ("TERM", (TERM,), TERM),
        ("TERM", (USR2,), 0),
        ("USR1,TERM", (USR2, int(signal.SIGUSR1)), int(signal.SIGUSR1)),
        ("TERM", (int(signal.SIGINT),), 0),
    ],
)
def test_asked(signals: str, came: tuple[int, ...], asked: int) -> None:
    job = Asked(signals)
    for signum in came:
        job.get(signum)
    assert job.part.asked == asked


@pytest.mark.parametrize("code", [None, 0, 1])
def test_ranks_that_end_are_not_stopped(
    code: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal or a handler that has saved ends the ranks; any exit code requeues the job."""
    job = Asked()
    job.get()
    job.end(code=code, signum=USR2 if code is None else None)
    assert job.requeue()
    assert job.done == ["look", ("flush", 80.0), "look", "requeue"]  # 0.7 of 120 s
    assert job.phase.name == "requeued"
    assert "SIGUSR2: the job is requeued\n" in capfd.readouterr().err


def test_ranks_that_go_on_are_stopped_after_a_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_signal, "TO_END", 0.001)
    job = Asked()
    job.get()
    assert job.requeue()
    assert job.done == ["look", ("end", 2), ("flush", 80.0), "look", "requeue"]
    assert job.state.stopped()


@pytest.mark.parametrize(("left", "limit"), [(1e6, flushing.END), (10.0, 10.0), (-5.0, 0.0)])
def test_the_flush_leaves_time_for_the_requeue(left: float, limit: float) -> None:
    job = Asked()
    job.get()
    job.end()
    job.shown = []
    job.show(end_time=time.time() + left)
    assert job.requeue()
    assert ("flush", limit) in job.done


AGAINST = [
    ({"batch": False}, "only batch jobs (sbatch) can be requeued"),
    ({"running": False, "state": "COMPLETING", "reason": "TimeLimit"}, "has ended it (TimeLimit)"),
    ({"running": False, "state": "CANCELLED"}, "Slurm has ended it (CANCELLED)"),
    ({"running": False, "state": "PENDING"}, "it is in the queue already"),
    ({"running": False, "state": "COMPLETING", "restarts": 1}, "it is in the queue already"),
]


@pytest.mark.parametrize(("shown", "why"), AGAINST)
def test_what_speaks_against_it(
    shown: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Asked()
    job.get()
    job.shown = []
    job.show(**shown)
    assert not job.requeue()
    assert job.done == ["look"]
    said = capfd.readouterr().err
    assert "SIGUSR2: the job is not requeued: " in said and why in said
    assert job.part.asked == 0 and job.phase.name != "requeued"
    job.get()
    assert job.part.asked == USR2, "a later signal asks anew"


def test_a_script_that_requeues_its_job_itself_is_not_requeued_twice() -> None:
    job = Asked()
    job.get()
    job.end(code=0, signum=None)
    job.show(running=False, state="COMPLETING", restarts=1)
    assert not job.requeue()
    assert job.done == ["look", ("flush", 80.0), "look"]


def test_a_term_that_was_refused_is_not_asked_for_again() -> None:
    job = Asked()
    job.get(TERM)
    job.shown = []
    job.show(running=False, state="CANCELLED")
    assert not job.requeue()
    assert job.part.asked == 0


def test_a_cancelled_step_is_not_brought_back() -> None:
    job = Asked()
    job.get()
    assert not job.requeue(over=True)
    assert job.done == ["look"]


def test_no_loop_of_requeues_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--time=1 --signal=USR2@120``: the signal comes at every start."""
    job = Asked()
    job.state.progress.beats = 0
    job.get()
    assert not job.requeue()
    monkeypatch.setattr(on_signal, "NO_LOOP", 0.0)
    job.get()
    job.end()
    assert job.requeue()


def test_slurm_that_does_not_answer_is_asked_by_the_requeue_itself() -> None:
    job = Asked()
    job.get()
    job.end()
    job.shown = [None]
    job.error = "cannot requeue: Slurm does not answer"
    assert not job.requeue()
    assert job.done == ["look", ("flush", 40.0), "look", "requeue"]
