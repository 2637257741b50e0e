"""examples/fsdp2.sbatch, submitted as it stands: losses of an undisturbed run, faults or none."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import LabFactory
from jobs import REPOSITORY, TORCH, Training, prepared
from torch_forks import TorchForks, all_end_well

from srun_wrapper.agent.processes.ports import free_port

pytest.importorskip("torch")

EXAMPLE = REPOSITORY / "examples" / "fsdp2.py"
WORLD = 4  # the file asks for 2 nodes and starts 2 ranks on each
STEPS = 30
WAIT = 150.0  # s; importing torch in every rank is most of it
Losses = list[tuple[int, str]]
_RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def losses(text: str) -> Losses:
    """Steps and their losses as printed, in the order of the text."""
    return [(int(n), loss) for n, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.M)]


class Example(Training):
    """The job of a user who has the repository at home."""

    @property
    def state(self) -> Path:
        return self.dir / ".robust-slurm"

    def submit_file(self) -> None:
        """``sbatch examples/fsdp2.sbatch --steps …`` on the login node."""
        home = self.dir / "robust-slurm"
        shutil.copytree(EXAMPLE.parent, home / "examples")
        for path in (home, *home.rglob("*")):
            os.chown(path, self.lab.uid, self.lab.uid)
        env = TORCH | {"HOME": str(self.dir), "TOY_TOKEN": self.token, "ROBUST_WARM": "0"}
        # Which steps are lost must not depend on how busy the machine is.
        env["ROBUST_CHECKPOINT_OVERHEAD"] = "0"
        words = ["sbatch", "--parsable", "examples/fsdp2.sbatch", f"--steps={STEPS}"]
        done = self.lab.exec("head", words, cwd=home, env=env, check=True)
        self.job = int(done.stdout)

    def out(self) -> str:
        path = self.dir / "robust-slurm" / f"fsdp2-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="module")
def undisturbed(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of four ranks on this machine, without robust-srun."""
    words = [str(EXAMPLE), f"--steps={STEPS}", f"--out={tmp_path_factory.mktemp('fsdp2')}"]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD)}
    ranks = [
        torch_forks.start(_RUN, *words, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(WORLD)
    ]
    all_end_well(ranks, WAIT)
    found = losses(ranks[0].out())
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return found


def test_a_node_lost(new_lab: LabFactory, undisturbed: Losses) -> None:
    """In any step; a standby node takes its place; all is restored from memory."""
    lab = new_lab(nodes=2, standby=1)
    training = Example(lab, prepared(lab, WORLD).dir, WORLD, STEPS)
    training.submit_file()
    step = random.randrange(2, 15)
    training.wait_step(step, WAIT)
    lab.crash("n2")
    assert training.wait_end(WAIT) == 0, training.story()
    done = set(losses(training.out()))
    assert done == set(undisturbed), f"node lost in step {step}: {done ^ set(undisturbed)}"
    (lost,) = training.incidents()
    assert lost["action"] == "swap_standby" and lost["swaps"] == [["n2", "s1"]], lost
    assert 0 <= lost["lost_steps"] <= 1 and lost["restored"], (step, lost)
    assert {event["tier"] for event in training.events("restore")} == {"memory"}, training.story()
    training.check_gone()
    assert not training.in_memory()
