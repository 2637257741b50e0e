"""Changes of the code through the real Recovery: no budget is spent, and nobody is blamed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from recovering import Recovering

from srun_wrapper.code.deployment import Deployment, deploy
from srun_wrapper.code.requests import Request
from srun_wrapper.code.snapshot import Asked, take
from srun_wrapper.code.versions import Book, Change, Kind
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.reporting import report
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.recover import restarted
from srun_wrapper.recover.recovery import UPDATED


class Job:
    """A job with code, whose user edits and asks."""

    def __init__(self, top: Path, max_restarts: int = 2) -> None:
        (top / "proj").mkdir()
        (top / "records").mkdir()
        self.train = top / "proj" / "train.py"
        self.train.write_text("first\n")
        self.asked = Asked(str(top / "proj"), str(top / "records" / "code"), (), 1e9)
        words = ["python", "train.py"]
        self.deployment: Deployment = deploy(
            self.asked, top / "records", ("me", "here"), str(top / "proj"), words, {}, restarts=True
        )[0]  # fmt: skip
        self.recovering = Recovering(max_restarts, deployment=self.deployment)
        self.recovery, self.state = self.recovering.recovery, self.recovering.state
        self.code = self.recovering.code
        self.book = self.deployment.book
        self.asks = 0

    def request(self, kind: Kind, text: str) -> str:
        self.train.write_text(text)
        version, _ = take(self.asked)
        self.asks += 1
        change = Change(str(self.asks), kind, version.id, "ada", "login", "why", time.time())
        self.book.add(version)
        self.code._received(
            Request("change", change, version), 1, self.deployment.code(version.id), ""
        )
        return version.id

    def runs(self) -> str:
        """Return the text of the program that ranks start with."""
        assert self.state.code is not None
        return (Path(self.state.code.tree) / "train.py").read_text()

    def steps(self, number: int) -> None:
        """The job reaches this step, and the watch sees it."""
        self.state.progress.numbered = True
        self.state.progress.reached(number)
        self.code.look(0.0)

    def crash(self, text: str = "ValueError: bad", signum: int | None = None) -> None:
        now = time.monotonic()
        code = 1 if signum is None else None
        tail = f"Traceback\n{text}\n"
        world = self.state.world
        world.note_exit(world.by_rank[1], code or 0, signum or 0)
        self.state.failures.append(Failure("crash", now, now, "n0", 1, code, signum, tail))

    def states(self) -> list[tuple[str, str]]:
        return [(c.kind, c.state) for c in self.book.changes]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(restarted, "proving_time", lambda _lived: 0.0)
    return Job(tmp_path)


def test_an_update_restarts_the_ranks_and_spends_nothing(job: Job) -> None:
    async def life() -> None:
        for number in range(5):  # more than max_restarts
            job.request("now", f"version {number}\n")
            assert job.recovery.update_due
            await job.recovery.update()
            assert job.runs() == f"version {number}\n" and not job.recovery.update_due
            change = job.book.in_force()
            assert change is not None and change.seconds > 0

    asyncio.run(asyncio.wait_for(life(), 20))
    assert job.recovery._localization.budget.failures == 0
    incidents = job.recovering.incidents
    assert [i.outcome for i in incidents] == ["recovered"] * 5
    record = incidents[0].record(12, "0")
    assert (record["symptom"], record["cause"], record["suspects"]) == ("update", "ordered", [])
    assert incidents[0].line().startswith("code c-")
    assert job.state.world.epoch == 6 and job.recovering.books


def test_a_failure_during_the_stop_comes_first_and_its_recovery_applies_the_update(
    job: Job,
) -> None:
    job.request("now", "second\n")
    obey = job.recovering.bus.obey

    def crashes(node: object, message: object) -> None:
        obey(node, message)  # type: ignore[arg-type]
        if isinstance(message, Stop):
            job.recovering.bus.obey = obey
            job.crash(signum=9)

    job.recovering.bus.obey = crashes  # type: ignore[assignment]

    async def life() -> None:
        await job.recovery.update()
        assert job.runs() == "first\n" and job.state.failures
        assert await job.recovery.handle() is None

    asyncio.run(asyncio.wait_for(life(), 20))
    assert job.runs() == "second\n"
    assert [i.diagnosis.symptom for i in job.recovering.incidents] == ["update", "crash"]


def test_a_lazy_update_waits_for_any_recovery(job: Job) -> None:
    job.request("lazy", "second\n")
    assert not job.recovery.update_due and job.runs() == "first\n"
    job.crash(signum=9)
    assert asyncio.run(job.recovery.handle()) is None
    assert job.runs() == "second\n"
    assert job.states() == [("start", "replaced"), ("lazy", "in force")]


def test_a_lazy_update_is_due_after_a_day(job: Job) -> None:
    job.request("lazy", "second\n")
    job.book.changes[-1].requested -= 24 * 3600 + 1
    assert job.recovery.update_due


def test_a_bad_update_is_rolled_back_once(job: Job) -> None:
    async def life() -> None:
        job.steps(10)
        job.request("now", "bad\n")
        await job.recovery.update()
        job.crash()
        assert await job.recovery.handle() is None
        assert job.runs() == "first\n"
        assert job.states()[-2:] == [("now", "rolled back"), ("automatic", "in force")]
        # The same error again, without progress: not the update's, and the usual ladder.
        job.crash()
        end = await job.recovery.handle()
        assert end is not None and end.code == 1

    asyncio.run(asyncio.wait_for(life(), 20))
    assert "bad" in job.book.changes[-2].outcome
    assert job.recovering.incidents[1].plan is not None
    assert job.recovering.incidents[1].plan.rung == "other-code"


def test_only_the_programs_own_failure_rolls_back(job: Job) -> None:
    async def life() -> None:
        job.steps(10)
        job.request("now", "second\n")
        await job.recovery.update()
        job.crash(signum=9)
        assert await job.recovery.handle() is None

    asyncio.run(asyncio.wait_for(life(), 20))
    assert job.runs() == "second\n"


def test_an_update_that_never_makes_a_step_is_replaced_by_the_next(job: Job) -> None:
    def step() -> None:
        for rank in job.state.world.by_rank.values():
            job.state.world.note_first_step(rank)
        job.state.changed.set()

    async def life() -> None:
        step()
        job.request("now", "hangs\n")
        hanging = asyncio.create_task(job.recovery.update())
        while job.state.world.epoch < 2:
            await asyncio.sleep(0.01)
        assert not hanging.done()
        job.request("now", "mended\n")
        await hanging
        mending = asyncio.create_task(job.recovery.update())
        while job.state.world.epoch < 3:
            await asyncio.sleep(0.01)
        step()
        await mending

    asyncio.run(asyncio.wait_for(life(), 20))
    assert job.runs() == "mended\n"
    assert [i.outcome for i in job.recovering.incidents] == [UPDATED, "recovered"]


def test_a_slip_of_ours_ends_no_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.request("lazy", "second\n")
    monkeypatch.setattr(Book, "apply", lambda *_any: 1 / 0)
    job.crash(signum=9)
    assert asyncio.run(job.recovery.handle()) is None
    assert job.runs() == "first\n" and job.recovering.incidents[0].outcome == "recovered"


def test_a_slip_does_not_restart_the_ranks_again_and_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.request("now", "second\n")
    monkeypatch.setattr(Book, "apply", lambda *_any: 1 / 0)
    asyncio.run(asyncio.wait_for(job.recovery.update(), 20))
    assert job.runs() == "first\n" and not job.recovery.update_due
    assert job.recovering.incidents[0].outcome == "recovered"
    assert job.states()[-1] == ("now", "refused")
    assert "division by zero" in job.book.changes[-1].outcome


def test_a_slip_while_a_version_is_looked_up_refuses_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deployment, "code", lambda *_any: 1 / 0)
    code, why = job.code._prepared(job.deployment, "any")
    assert code is None and "division by zero" in why


def test_without_a_version_that_worked_there_is_no_way_back(job: Job) -> None:
    async def life() -> None:
        job.request("now", "bad\n")
        await job.recovery.update()
        job.crash()
        assert await job.recovery.handle() is None
        assert job.runs() == "bad\n"

    asyncio.run(asyncio.wait_for(life(), 20))


def test_an_update_that_fixes_the_error_is_tried_before_the_job_stops(job: Job) -> None:
    async def life() -> None:
        job.crash()
        assert await job.recovery.handle() is None
        job.request("lazy", "mended\n")
        job.crash()  # the same error, the second time: without the update the job stops
        assert await job.recovery.handle() is None

    asyncio.run(asyncio.wait_for(life(), 20))
    assert job.runs() == "mended\n"


def test_progress_makes_a_version_one_to_go_back_to(job: Job) -> None:
    async def life() -> None:
        first = job.book.current
        assert job.book.progressed == []
        job.steps(10)
        assert job.book.progressed == [first]
        second = job.request("now", "second\n")
        await job.recovery.update()
        job.code.look(0.0)
        assert job.book.progressed == [first]  # nothing yet
        job.steps(11)
        assert job.book.progressed == [first, second]

    asyncio.run(asyncio.wait_for(life(), 20))


def test_a_version_that_is_gone_from_the_store_is_refused(job: Job) -> None:
    change = Change("9", "now", "c-none", "ada", "login", "", time.time())
    job.code._received(Request("change", change), 1, None, "version c-none is not there")
    assert job.states()[-1] == ("now", "refused") and not job.recovery.update_due


def test_a_known_version_that_is_gone_is_refused_too(job: Job) -> None:
    known = job.request("lazy", "second\n")
    change = Change("9", "rollback", known, "ada", "login", "", time.time())
    job.code._received(Request("change", change), 1, None, "it is not there any more")
    assert job.states()[-2:] == [("lazy", "waiting"), ("rollback", "refused")]
    assert job.book.changes[-1].outcome == "it is not there any more"


def test_a_name_that_is_no_path_ends_no_follower(job: Job) -> None:
    code, why = job.code._prepared(job.deployment, "a\0b")
    assert code is None and why


def test_what_is_said_of_a_request_is_one_line_each(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = Change("9", "now", "../\x1b[31m\nme", "ada\n", "\x1b[0m", "why\nnot", time.time())
    job.code._received(Request("change", odd), 1, None, f"version {odd.version} is not there")
    job.code._received(Request("cancel", odd), 2, None, "")
    report.flush()
    said = capfd.readouterr().err
    assert said.count("\n") == 2 and "\x1b" not in said, said
    assert not job.recovery.update_due
