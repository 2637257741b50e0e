"""Real torch over gloo: steps are seen without a change to the script, and every fault survived."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import LabFactory
from jobs import TORCH, Training, command_line, prepared
from places import CLUSTER

from lab import Lab
from lab.keeper.ranks import scan

pytest.importorskip("torch")

SCRIPT = CLUSTER / "tiny_ddp.py"
STEPS = 40
WAIT_AT = 25  # the script's
HANG = 3.0  # s, the shortest that counts as one
WAIT = 120.0  # s; importing torch in every rank is most of it


class Ddp(Training):
    """tiny_ddp.py in place of the toy; it saves at steps 10, 20, …"""

    def exports(self) -> dict[str, str]:
        return super().exports() | TORCH

    def words(self, *options: str) -> str:
        return " ".join([str(SCRIPT), "--dir", str(self.dir), f"--steps={self.steps}", *options])

    def roster(self) -> dict[str, Any]:
        return self.rosters()[-1]

    def wait_epoch(self, epoch: int, counted: int) -> None:
        """All ranks of the epoch wait in step 25, and ``counted`` steps were seen."""
        ready = f"waiting.{epoch}.*"
        self.until(lambda: len(list(self.dir.glob(ready))) == self.world, f"epoch {epoch}", WAIT)
        self.until(lambda: self.roster()["step"] == counted, f"{counted} steps in the roster", 20)

    def check(self, *, epoch: int, loss: float | None = None) -> None:
        assert self.wait_end(WAIT) == 0, self.story()
        final = self.final()
        assert (final["step"], final["epoch"]) == (STEPS, epoch), self.story()
        assert loss is None or final["loss"] == loss
        for rank in range(self.world):
            assert self.says(rf"^rank {rank} done"), self.story()
        self.check_gone()


def ddp(lab: Lab, world: int = 4) -> Ddp:
    return Ddp(lab, prepared(lab, world).dir, world, STEPS)


@pytest.fixture(scope="module")
def loss(module_lab: Lab) -> Iterator[float]:
    """The loss at the end of a run that nothing disturbs, and, with --robust-no-auto, observes."""
    training = ddp(module_lab)
    options = ["-N2", "--ntasks-per-node=2"]
    training.submit(f"robust-srun --robust-no-auto python {training.words()}", options)
    training.check(epoch=1)
    assert training.roster()["step"] is None
    assert not training.incidents()
    yield float(training.final()["loss"])


def test_ddp_without_a_beat(new_lab: LabFactory, loss: float) -> None:
    """A rank killed, then a node lost; the ranks report nothing, torch's hook counts the steps.

    Every rank is a shell that waits for its python; nothing of it may outlive the shell.
    """
    lab = new_lab(nodes=3, standby=0)
    training = ddp(lab)
    script = training.dir / "run.sh"
    command = f"{sys.executable} {training.words('--waits=2')}"
    script.write_text(f"echo start $SLURM_PROCID\n{command}\nexit $?\n")
    options = ["-N3", "--ntasks-per-node=2"]
    training.submit(f"robust-srun --robust-spares=1 bash {script}", options)
    training.wait_epoch(1, WAIT_AT - 1)
    before = {p.pid for rank in range(training.world) for p in training.processes(rank=rank)}
    assert len(before) >= 2 * training.world  # a shell and its python each
    training.kill("run.sh", rank=2)
    training.wait_epoch(2, WAIT_AT - 1 - 20)
    assert not before & {p.pid for p in training.processes()}
    lab.crash("n2")
    training.check(epoch=3, loss=loss)
    assert training.says(r"^rank 2 done on n3")
    assert [training.out().count(f"start {rank}\n") for rank in range(training.world)] == [3] * 4
    killed, lost = training.incidents()
    assert (killed["symptom"], killed["action"], killed["swaps"]) == ("crash", "restart", [])
    assert (lost["symptom"], lost["action"]) == ("node_lost", "swap_spare")
    assert lost["swaps"] == [["n2", "n3"]]
    assert killed["outcome"] == lost["outcome"] == "recovered"


def inner_ranks(training: Ddp) -> dict[int, int]:
    """RANK -> pid of the processes that torchrun started."""
    return {
        int(process.environ["RANK"]): process.pid
        for process in training.processes(str(SCRIPT))
        if "TORCHELASTIC_RUN_ID" in process.environ and "torchrun" not in command_line(process.pid)
    }


def test_torchrun(new_lab: LabFactory, loss: float) -> None:
    """One task per node; an inner rank killed, then a node lost and a spare in its place.

    The spare has never run torchrun, and has its ranks ready.
    """
    lab = new_lab(nodes=3, standby=0)
    training = ddp(lab)
    # The endpoint is what most scripts compute: the batch host, the job's first node.
    command = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    command += f" --rdzv-endpoint=$(hostname):29513 {training.words('--waits=3')}"
    options = "--robust-spares=1 --robust-warm"
    training.submit(f"robust-srun {options} {command}", ["-N3", "--ntasks-per-node=1", "-c2"])
    training.wait_epoch(1, WAIT_AT - 1)
    first = inner_ranks(training)
    assert sorted(first) == list(range(training.world))
    os.kill(first[3], signal.SIGKILL)
    training.wait_epoch(2, WAIT_AT - 1 - 20)
    assert not set(first.values()) & set(inner_ranks(training).values())  # the world began anew
    wanted = {"n1": 2, "n2": 2, "n3": 2}
    training.until(lambda: ready(training) == wanted, "two warm ranks on each node", WAIT)
    lab.crash("n2")
    training.until(lambda: len(forked(training)) == training.world, "all ranks forked", WAIT)
    (training.dir / "go").touch()
    training.check(epoch=3, loss=loss)
    assert training.says(r"done on n3")
    killed, lost = training.incidents()
    assert (killed["symptom"], killed["action"], killed["swaps"]) == ("crash", "restart", [])
    assert (lost["symptom"], lost["action"]) == ("node_lost", "swap_spare")
    assert lost["swaps"] == [["n2", "n3"]]


def test_torchruns_ranks_that_end_some_seconds_apart_are_no_hang(lab: Lab) -> None:
    """Each exits with 0, the last one long after the limit of a hang; none is started again."""
    training = ddp(lab)
    words = training.words(f"--linger={2 * HANG / 3}")
    command = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    command += f" --rdzv-endpoint=$(hostname):29514 {words}"
    options = f"--robust-hang-floor={HANG} --robust-interval=0.2"
    training.submit(f"robust-srun {options} {command}", ["-N2", "--ntasks-per-node=1", "-c2"])
    training.check(epoch=1)
    ends = re.findall(r"^rank (\d) done", training.out(), re.MULTILINE)
    assert ends == ["0", "1", "2", "3"], training.story()
    assert training.roster()["step"] == STEPS, "the hang watch had steps to go by"
    assert not training.incidents() and not training.accusations(), training.story()
    assert [event["epoch"] for event in training.events("epoch")] == [1]
    assert not training.says("hang|no step"), training.out()


def ready(training: Ddp) -> dict[str, int]:
    """Node → ranks that would start warm there."""
    return {node["name"]: node["warm"] for node in training.roster()["nodes"]}


def forked(training: Ddp) -> list[int]:
    """Return torchrun's ranks that robust-task has forked."""
    tasks = {process.pid for process in training.processes("srun_wrapper.agent.task")}
    parents = {process.pid: process.ppid for process in scan()}
    return [rank for rank, pid in inner_ranks(training).items() if parents.get(pid) in tasks]
