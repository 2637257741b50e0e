"""The srun that robust-srun has started is killed; robust-srun and the ranks are well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from conftest import LabFactory
from jobs import Training, start


def own_srun(training: Training) -> int:
    """The pid of the step's srun on n1: of its two processes the first."""
    names = {process.pid: Path(f"/proc/{process.pid}/comm") for process in training.processes()}
    return min(pid for pid, comm in names.items() if comm.read_text().strip() == "srun")


def test_another_step_goes_on(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2)
    training = start(lab, 2, toy="--hold 8")
    training.wait_step(8)
    os.kill(own_srun(training), signal.SIGKILL)
    training.wait_says("srun was killed by SIGKILL")
    training.check_done()
    assert training.runs() == [["n1", "n2"]] * 2 and not training.incidents()
