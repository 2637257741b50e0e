"""Code replaced under a running job: at once, at the next recovery, and back by itself.

The user's module is the plan of the training's data as well: each version has another."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any

import data_plan
import pytest
from conftest import LabFactory
from jobs import REPOSITORY, TOY, prepared

from lab import Cluster
from robust_slurm.data.steps import LocalSteps

DATA = REPOSITORY / "tests" / "support" / "data"
VERSIONS = {"one": (1, 0.75), "two": (2, 0.75), "three": (2, 0.4)}
"""The plan of each: what decode makes of a number, and the part of one of the sources."""
RANKS = 3  # one a node: they exchange lanes
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
        self.training = prepared(lab, RANKS, steps=100_000)
        self.dir = self.training.dir / "proj"
        (self.dir / "lib").mkdir(parents=True)
        (self.dir / "train.py").write_text(TRAIN)
        self.write("one")
        for path in (self.dir, *self.dir.rglob("*")):
            os.chown(path, lab.uid, lab.uid)

    def write(self, name: str) -> None:
        """Edit the user's own module."""
        made = f"return data_plan.version(*{VERSIONS.get(name)})"
        if name == "bad":
            made = "raise ValueError('bad recipe')"
        text = f"import data_plan\nNAME = {name!r}\ndef plan():\n    {made}\n"
        (self.dir / "lib" / "mine.py").write_text(text)

    def start(self, robust: str = "") -> None:
        path = f"export PYTHONPATH={self.dir}/lib:{REPOSITORY}:{DATA}"
        words = f"--robust-code=. --robust-code-exclude=runs {robust}"
        toy = f"--dir {self.training.dir} --steps {self.training.steps} --step-time=0.05"
        toy += " --data=mine:plan"
        line = f"robust-srun {words} python train.py {toy}"
        body = f"cd {self.dir}; {path}\n{line}"
        self.training.submit(body, [f"-N{RANKS}", "--ntasks-per-node=1"])

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
    return new_lab(nodes=3, standby=0)


def test_code_is_replaced_now_lazily_and_back_by_itself(lab: Cluster) -> None:
    project = Project(lab)
    training = project.training
    project.start("--robust-warm --robust-warm-packages=mine")
    training.wait_step(20)
    assert project.running("one") == RANKS

    # An edit alone changes nothing, not even for ranks that start again.
    project.write("two")
    training.kill("train.py", rank=1)
    project.wait_runs("one", 2 * RANKS)

    # Now.
    two = project.update("--now")
    assert two["state"] == "in force" and two["seconds"] < 30, two
    assert project.running("two") == RANKS
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
    project.wait_runs("three", RANKS)
    project.wait_progress(three["version"])

    # A bad one goes back by itself, and blames no node.
    bad = project.update("--now", code=1)
    assert bad["state"] == "rolled back" and "bad recipe" in bad["outcome"], bad
    project.wait_runs("three", 2 * RANKS)
    said = "the last version that made progress: .*bad recipe"
    assert training.says(f"rolled back to code {three['version']}, {said}"), training.out()

    training.until(lambda: 6 in read_by_epoch(project), "its steps in the sixth epoch")

    # Back by hand, and what was never given.
    assert project.update("--rollback")["version"] == two["version"]
    assert project.running("two") == 2 * RANKS
    assert project.run(["robust-update", "999999", "--now"]).returncode == 2
    assert not training.accusations()
    kinds = [(c["kind"], c["state"]) for c in project.book()["changes"]]
    assert kinds == [
        ("start", "replaced"), ("now", "replaced"), ("lazy", "replaced"),
        ("now", "rolled back"), ("automatic", "replaced"), ("rollback", "in force"),
    ], kinds  # fmt: skip
    check_one_data_process(project)
    lab.exec("head", ["scancel", str(training.job)])
    training.wait_end()
    training.check_gone()
    check_order(project, ["one", "one", "two", "three", "bad", "three", "two"])


def check_one_data_process(project: Project) -> None:
    """Each node has one: those of earlier versions have ended."""
    nodes = [
        each.environ["SLURMD_NODENAME"]
        for each in project.training.processes("data/service/main.py")
    ]
    assert sorted(nodes) == ["n1", "n2", "n3"], project.training.story()


def read_by_epoch(project: Project) -> dict[int, dict[tuple[int, int], int]]:
    """Return the checksums of what ranks have read: epoch -> (step, rank) -> checksum."""
    read: dict[int, dict[tuple[int, int], int]] = {}
    for rank in range(RANKS):
        for line in (project.training.dir / f"order-{rank}").read_text().splitlines(True):
            if line.endswith("\n"):
                step, _, crc, _, epoch, _ = line.split()
                read.setdefault(int(epoch), {})[int(step), rank] = int(crc)
    return read


def check_order(project: Project, names: list[str]) -> None:
    """Each start has read from its first step on what its version's plan gives after the
    step before it, and none of the starts has read anything else; what counts in the end has each
    document once in each pass. ``names``: the version of each start."""
    read = read_by_epoch(project)
    assert set(read) == {epoch for epoch, name in enumerate(names, 1) if name != "bad"}
    states: dict[int, Any] = {0: None}
    counted: dict[int, list[int]] = {}  # step -> first numbers of its documents
    for epoch, found in sorted(read.items()):
        name = names[epoch - 1]
        steps = LocalSteps(data_plan.version(*VERSIONS[name]), range(RANKS), RANKS)
        first, last = min(found)[0], max(found)[0]
        steps.seek(states[first - 1])
        counted = {step: kept for step, kept in counted.items() if step < first}
        for step in range(first, last + 1):
            _, rows, states[step] = steps.next()
            for rank in range(RANKS):
                got = found.get((step, rank))
                assert got == data_plan.checksum(rows[rank]) or (got is None and step == last), (
                    name,
                    step,
                )
            counted[step] = documents(rows, VERSIONS[name][0])
        steps.close()
    assert list(counted) == list(range(1, last + 1))
    carried = len(states[last]["carried"])  # drawn, and in no step yet
    times = Counter(one for each in counted.values() for one in each)
    for corpus in data_plan.CORPORA:
        passes = max(times[one] for one in corpus)
        assert sum(max(0, passes - 1 - times[one]) for one in corpus) <= carried, (passes, times)


def documents(rows: Mapping[int, Mapping[str, Any]], factor: int) -> list[int]:
    """The first number of each document of a step."""
    found = []
    for batch in rows.values():
        begins = (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
        found += [int(number) // factor for number in batch["tokens"][begins]]
    return found


def test_a_store_that_most_nodes_do_not_see_stops_the_job_and_blames_none(
    new_lab: LabFactory,
) -> None:
    project = Project(new_lab(nodes=3, standby=0))
    training = project.training
    project.start("--robust-code-store=/tmp/store")
    assert training.wait_end() == 2, training.story()
    record = training.only_incident(symptom="crash", cause="shared", action="stop", suspects=[])
    assert record["evidence"][0] == "2 of 3 nodes cannot start a rank: n[2-3]"
    assert "the snapshot of the code is not on this node" in record["evidence"][1]
    assert training.says("see that they have the same mounts .*code_store"), training.out()
    assert not training.accusations()
    training.check_gone()
