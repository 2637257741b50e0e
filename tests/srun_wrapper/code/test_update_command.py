"""robust-update: bad input, the list, and a request that robust-srun answers."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import until

from robust_slurm.state_dir import job_dirs
from robust_slurm.state_dir.ledger import replace_file
from srun_wrapper.code.cli import main
from srun_wrapper.code.deployment import BOOK, REQUESTS, Deployment, deploy, read_book
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.requests import read_from
from srun_wrapper.code.snapshot import Asked, take
from srun_wrapper.code.versions import Change, Version


class Job:
    """A job's records, with a snapshot in force, and no robust-srun."""

    def __init__(self, top: Path) -> None:
        self.state = top / "state"
        self.records = self.state / "jobs" / "7"
        self.records.mkdir(parents=True)
        self.proj = top / "proj"
        self.proj.mkdir()
        (self.proj / "train.py").write_text("one\n")
        asked = Asked(str(self.proj), str(self.records / "code"), (), 1e9)
        self.deployment: Deployment = deploy(
            asked, self.records, ("me", "here"), str(self.proj), ["python", "train.py"], {},
            restarts=True,
        )[0]  # fmt: skip

    def run(self, *words: str, job: str = "7") -> int:
        return main([job, "--state-dir", str(self.state), *words])

    def save(self) -> None:
        replace_file(self.records / BOOK, msgspec.to_builtins(self.deployment.book))

    def answer(self) -> None:
        """Take the first request in and apply it, as robust-srun does."""
        book = self.deployment.book
        until(lambda: read_from(self.records / REQUESTS, book.read)[0], "a request")
        ((request, _),), book.read = read_from(self.records / REQUESTS, book.read)
        assert request.version is not None
        book.add(request.version)
        assert book.request(request.change) == ""
        if request.change.kind == "now":
            book.apply(request.change, 1.0)
            request.change.seconds, request.change.outcome = 0.5, "all ranks past a step"
        self.save()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "not a job id"),
        (("7", "--wait", "nan"), "not a number of seconds"),
        (("7", "--now", "--lazy"), "does not go together with"),
        (("7", "--lazy", "--rollback"), "--lazy goes with an update alone"),
        (("8",), "no records of job 8"),
        (("7", "--rollback"), "no earlier version has made progress"),
    ],
)
def test_bad_input(
    job: Job, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run(*words[1:], job=words[0]) == 2
    assert said in capsys.readouterr().err


def test_a_job_without_code_and_another_users_job(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.records / BOOK).write_bytes(b'{"source": "\xff"}')  # cannot be read
    assert job.run() == 2
    (job.records / BOOK).unlink()
    assert job.run() == 2
    assert "start it with robust-srun --robust-code=DIR" in capsys.readouterr().err
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    assert job.run() == 2
    assert f"job 7 belongs to uid {real}: only that user" in capsys.readouterr().err
    assert job_dirs.owner(str(job.records)) == real


def answered(job: Job, *words: str) -> int:
    thread = threading.Thread(target=job.answer)
    thread.start()
    try:
        return job.run(*words)
    finally:
        thread.join()


@pytest.mark.parametrize(("when", "state"), [("--now", "in force"), ("--lazy", "waiting")])
def test_a_request(job: Job, when: str, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    (job.proj / "train.py").write_text("two\n")
    assert answered(job, when, "--why=faster\udcff\nnow", "--json") == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["state"] == state and said["version"].startswith("c-")
    book = read_book(job.records / BOOK)
    assert book is not None and [c.kind for c in book.changes] == ["start", when[2:]]
    assert job.run("--list") == 0
    text = capsys.readouterr().out
    assert said["version"] in text and "faster? now" in text and state in text


def test_nothing_to_do(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.run() == 0
    assert "is in force already" in capsys.readouterr().err
    assert job.run("--cancel") == 1
    assert "no update waits" in capsys.readouterr().err


def test_a_job_that_has_ended(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.deployment.book.running = False
    job.save()
    (job.proj / "train.py").write_text("two\n")
    assert job.run() == 1
    assert "its robust-srun has ended" in capsys.readouterr().err


def test_a_version_without_the_program_or_the_working_directory_is_refused(
    tmp_path: Path,
) -> None:
    """Ranks must not take the missing file or directory from the live directory."""
    job = Job(tmp_path)
    (job.proj / "exp").mkdir()
    (job.proj / "exp" / "a.toml").write_text("a = 1\n")
    asked = Asked(str(job.proj), str(job.records / "code"), (), 1e9)
    good, _ = take(asked)
    train = str(job.proj / "train.py")
    deployed = Deployment(
        job.deployment.book, job.records, str(job.proj / "exp"), ("python", train), ""
    )
    deployed.first = deployed.code(good.id)
    assert deployed.first.command == ("python", f"{deployed.first.tree}/train.py")
    (job.proj / "exp" / "a.toml").unlink()
    (job.proj / "exp").rmdir()
    with pytest.raises(CodeError, match=r"has no .*/proj/exp, where"):
        deployed.code(take(asked)[0].id)
    (job.proj / "exp").mkdir()
    (job.proj / "exp" / "a.toml").write_text("a = 1\n")
    (job.proj / "train.py").rename(job.proj / "main.py")
    with pytest.raises(CodeError, match=r"has no .*/proj/train.py, where"):
        deployed.code(take(asked)[0].id)


def runs_again(job: Job) -> tuple[Deployment, str]:
    asked = Asked(str(job.proj), str(job.records / "code"), (), 1e9)
    me, words = ("me", "here"), ["python", "train.py"]
    return deploy(asked, job.records, me, str(job.proj), words, {}, restarts=True)


def test_a_job_that_runs_again_goes_on_with_its_version_in_force(job: Job) -> None:
    first = job.deployment.book.current
    (job.proj / "train.py").write_text("edited since\n")
    again, line = runs_again(job)
    assert again.book.current == first and "the version in force" in line
    assert again.first is not None and again.first.directory.endswith(first)


def test_a_job_that_runs_again_does_without_what_is_gone(job: Job) -> None:
    book = job.deployment.book
    first, gone = book.current, Version("gone", "digest", "", 1, 1, 1.0)
    book.add(gone)
    assert book.request(Change("9", "lazy", gone.id, "me", "here", "", 1.0)) == ""
    job.save()
    again, _ = runs_again(job)
    assert again.book.current == first and again.book.changes[-1].state == "refused"
    (job.records / "code" / f"{first}.json").unlink()
    (job.proj / "train.py").write_text("edited since\n")
    again, line = runs_again(job)
    assert again.book.current != first and "in force" not in line
