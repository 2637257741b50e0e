"""Code replaced under a running job: at once, at the next recovery, and back by itself."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from conftest import LabFactory
from jobs import REPOSITORY, TOY, prepared

from lab import Cluster

TRAIN = f"""import os
import runpy
import sys

import mine
print("rank", os.environ["RANK"], "runs", mine.NAME, "in", os.environ["ROBUST_CODE_VERSION"],
      flush=True)
sys.argv[0] = {str(TOY)!r}
runpy.run_path({str(TOY)!r}, run_name="__main__")
"""


class Project:
    """A user's directory, and the job that runs from it."""

    def __init__(self, lab: Cluster) -> None:
        self.lab = lab
        self.training = prepared(lab, 4, steps=100_000)
        self.dir = self.training.dir / "proj"
        (self.dir / "lib").mkdir(parents=True)
        (self.dir / "train.py").write_text(TRAIN)
        self.write("one")
        for path in (self.dir, *self.dir.rglob("*")):
            os.chown(path, lab.uid, lab.uid)

    def write(self, name: str) -> None:
        """Edit the user's own module."""
        text = f"NAME = {name!r}\n" if name != "bad" else "raise ValueError('bad recipe')\n"
        (self.dir / "lib" / "mine.py").write_text(text)

    def start(self, robust: str = "", nodes: int = 2, ranks: int = 2) -> None:
        """``ranks``: of each node."""
        path = f"export PYTHONPATH={self.dir}/lib:{REPOSITORY}"
        words = f"--robust-code=. --robust-code-exclude=runs {robust}"
        toy = f"--dir {self.training.dir} --steps {self.training.steps} --step-time=0.05"
        line = f"robust-srun {words} python train.py {toy}"
        body = f"cd {self.dir}; {path}\n{line}"
        self.training.submit(body, [f"-N{nodes}", f"--ntasks-per-node={ranks}"])

    def update(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Run robust-update as the user, on the login node."""
        argv = ["robust-update", str(self.training.job), *words]
        done = self.run([*argv, "--json", "--why=test"])
        assert done.returncode == code, f"{done.stderr}\n{self.training.story()}"
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return found

    def run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        env = {"ROBUST_STATE_DIR": str(self.training.state)}
        return self.lab.exec("head", argv, env=env, timeout=60)

    def running(self, name: str) -> int:
        """Return how many starts of ranks with this module were seen."""
        return len([line for line in self.training.out().splitlines() if f" runs {name} " in line])

    def wait_runs(self, name: str, ranks: int) -> None:
        what = f"{ranks} starts with {name}"
        self.training.until(lambda: self.running(name) >= ranks, what)

    def book(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.training.job_dir() / "code.json").read_text())
        return found

    def wait_progress(self, version: str) -> None:
        """Wait until this version is one to go back to."""
        what = f"progress of {version}"
        self.training.until(lambda: self.book()["progressed"][-1:] == [version], what)


@pytest.fixture
def lab(new_lab: LabFactory) -> Cluster:
    return new_lab(nodes=2, standby=0)


def test_code_is_replaced_now_lazily_and_back_by_itself(lab: Cluster) -> None:
    project = Project(lab)
    training = project.training
    project.start("--robust-warm --robust-warm-packages=mine")
    training.wait_step(20)
    assert project.running("one") == 4

    # An edit alone changes nothing, not even for ranks that start again.
    project.write("two")
    training.kill("train.py", rank=1)
    project.wait_runs("one", 8)

    # Now.
    two = project.update("--now")
    assert two["state"] == "in force" and two["seconds"] < 30, two
    assert project.running("two") == 4
    assert training.says(r"^robust-srun: code c-\w+ of .*: ranks restarted in .* lost$")
    *_, incident = training.incidents()
    assert incident["symptom"] == "update" and incident["suspects"] == []
    assert incident["lost_steps"] <= 5 + 2, incident  # a checkpoint every 5 steps
    project.wait_progress(two["version"])

    # At the next recovery; what is edited after the request is not part of it.
    project.write("three")
    three = project.update("--lazy")
    assert three["state"] == "waiting"
    project.write("bad")
    assert project.running("three") == 0
    training.kill("train.py", rank=2)
    project.wait_runs("three", 4)
    project.wait_progress(three["version"])

    # A bad one goes back by itself, and blames no node.
    bad = project.update("--now", code=1)
    assert bad["state"] == "rolled back" and "bad recipe" in bad["outcome"], bad
    project.wait_runs("three", 8)
    said = "the last version that made progress: .*bad recipe"
    assert training.says(f"rolled back to code {three['version']}, {said}"), training.out()

    # Back by hand, and what was never given.
    assert project.update("--rollback")["version"] == two["version"]
    assert project.running("two") == 8
    assert project.run(["robust-update", "999999", "--now"]).returncode == 2
    assert not training.accusations()
    kinds = [(c["kind"], c["state"]) for c in project.book()["changes"]]
    assert kinds == [
        ("start", "replaced"), ("now", "replaced"), ("lazy", "replaced"),
        ("now", "rolled back"), ("automatic", "replaced"), ("rollback", "in force"),
    ], kinds  # fmt: skip
    lab.exec("head", ["scancel", str(training.job)])
    training.wait_end()
    training.check_gone()


def test_a_store_that_most_nodes_do_not_see_stops_the_job_and_blames_none(
    new_lab: LabFactory,
) -> None:
    project = Project(new_lab(nodes=3, standby=0))
    training = project.training
    project.start("--robust-code-store=/tmp/store", nodes=3, ranks=1)
    assert training.wait_end() == 2, training.story()
    record = training.only_incident(symptom="crash", cause="shared", action="stop", suspects=[])
    assert record["evidence"][0] == "2 of 3 nodes cannot start a rank: n[2-3]"
    assert "the snapshot of the code is not on this node" in record["evidence"][1]
    assert training.says("see that they have the same mounts .*code_store"), training.out()
    assert not training.accusations()
    training.check_gone()
