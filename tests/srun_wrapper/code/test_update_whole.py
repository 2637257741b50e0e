"""Code replaced under a running job, by the commands that users have; Slurm itself is left out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import REPOSITORY
from srun_here import JOB, Step, lines_with

from lab.keeper.ranks import scan

pytestmark = pytest.mark.slow
TOY = REPOSITORY / "tests" / "cluster" / "toy.py"
TRAIN = f"""import os, runpy, sys
import mine
print("rank", os.environ["RANK"], "runs", mine.NAME, SCRIPT, "in",
      os.environ["ROBUST_CODE_VERSION"], flush=True)
sys.argv[0] = {str(TOY)!r}
runpy.run_path({str(TOY)!r}, run_name="__main__")
"""
RANKS = 2


class Project:
    """A user's directory, and the job that runs from it."""

    def __init__(self, top: Path) -> None:
        self.dir, self.toy = top / "proj", top / "toy"
        for path in (self.dir, self.toy):
            path.mkdir()
        wrapper = self.dir / "go.sh"
        wrapper.write_text('#!/bin/sh\ncd "$(dirname "$0")" && exec python train.py "$@"\n')
        wrapper.chmod(0o755)
        self.write("one")
        self.step = Step(top, RANKS)

    def write(self, name: str) -> None:
        """Edit the script and the user's own module."""
        bad = "raise ValueError('bad recipe')\n" if name == "bad" else ""
        (self.dir / "mine.py").write_text(f"{bad}NAME = {name!r}\n")
        (self.dir / "train.py").write_text(f"SCRIPT = {name!r}\n{TRAIN}")

    def start(self, *words: str, directory: Path | None = None) -> None:
        toy = ["--dir", str(self.toy), "--steps", "100000", "--step-time", "0.03"]
        self.step.start(directory or self.dir, f"--robust-code={self.dir}", *words, *toy)

    def update(self, *words: str, code: int = 0) -> dict[str, Any]:
        argv = ["srun_wrapper.code.cli", str(JOB), "--json", "--why=test", *words]
        done = self.step.run(*argv)
        assert done.returncode == code, f"{done.stderr}\n{self.step.said()}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait_runs(self, name: str, starts: int) -> None:
        """Wait until so many times all ranks have started with this module."""
        lines = lambda: lines_with(self.step.said(), [f" runs {name} {name} "])  # noqa: E731
        self.step.until(lambda: len(lines()) >= starts * RANKS, f"{starts} starts with {name}")

    def wait_steps(self, number: int) -> None:
        """Wait for so many more steps."""
        steps = lambda: len(lines_with(self.step.said(), ["step ", " loss "]))  # noqa: E731
        wanted = steps() + number
        self.step.until(lambda: steps() >= wanted, f"{number} more steps")

    def kill(self, rank: int) -> None:
        own = (str(self.toy), str(rank))
        found = [p.pid for p in scan() if p.environ.get("RANK") == str(rank)]
        pids = [pid for pid in found if own[0] in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(pids[0], signal.SIGKILL)

    def book(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.step.state / "jobs" / str(JOB) / "code.json").read_text()
        )
        return found

    def incidents(self) -> list[dict[str, Any]]:
        path = self.step.state / "jobs" / str(JOB) / "incidents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    made.step.close()


def test_now_lazily_back_by_itself_and_by_hand(project: Project) -> None:
    project.start("--robust-no-warm", "python", "train.py")
    project.wait_runs("one", 1)
    project.wait_steps(10)

    # An edit alone changes nothing, not even for ranks that start again.
    project.write("two")
    project.kill(rank=1)
    project.wait_runs("one", 2)
    project.wait_steps(10)

    said = project.update("--now")
    assert said["state"] == "in force", said
    project.wait_runs("two", 1)
    incident = project.incidents()[-1]
    assert (incident["symptom"], incident["suspects"]) == ("update", [])
    assert incident["lost_steps"] <= 10, incident  # the toy saves every 5 steps

    # At the next recovery; what is edited after the request is not part of it.
    project.write("three")
    assert project.update("--lazy")["state"] == "waiting"
    project.write("bad")
    project.wait_steps(10)
    project.kill(rank=1)
    project.wait_runs("three", 1)
    project.wait_steps(10)

    # A version that fails is rolled back by itself.
    said = project.update("--now", code=1)
    assert said["state"] == "rolled back" and "bad recipe" in said["outcome"], said
    project.wait_runs("three", 2)
    project.wait_steps(10)
    assert lines_with(project.step.said(), ["rolled back to code", "bad recipe"])

    assert project.update("--rollback")["state"] == "in force"
    project.wait_runs("two", 2)
    kinds = [(change["kind"], change["state"]) for change in project.book()["changes"]]
    assert kinds == [
        ("start", "replaced"), ("now", "replaced"), ("lazy", "replaced"), ("now", "rolled back"),
        ("automatic", "replaced"), ("rollback", "in force"),
    ]  # fmt: skip

    # The job runs again: the version in force, not what the directory holds now.
    project.step.close()
    assert project.book()["running"] is False
    project.start("--robust-no-warm", "python", "train.py")
    project.wait_runs("two", 3)


def test_a_wrapper_in_the_directory_and_warm_interpreters(project: Project, tmp_path: Path) -> None:
    """Warm ranks run the new version, too."""
    project.start("--robust-warm", "--robust-warm-packages=mine", "python", "-m", "train")
    project.wait_runs("one", 1)
    roster = project.step.state / "jobs" / str(JOB) / "roster.0.json"
    warm = lambda: json.loads(roster.read_text())["nodes"][0]["warm"] == RANKS  # noqa: E731
    project.step.until(lambda: roster.exists() and warm(), "warm ranks")
    project.write("two")
    assert project.update()["state"] == "in force"
    project.wait_runs("two", 1)
    assert project.incidents()[-1]["warm"] == RANKS
    project.step.close()

    project.step.state.rename(tmp_path / "old-state")
    project.write("three")
    project.start(str(project.dir / "go.sh"), directory=tmp_path)
    project.wait_runs("three", 1)
    project.wait_steps(5)
    project.write("four")
    (project.dir / "go.sh").write_text((project.dir / "go.sh").read_text() + "# edited\n")
    assert project.update()["state"] == "in force"
    project.wait_runs("four", 1)
