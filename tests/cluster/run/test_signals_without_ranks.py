"""Signals that come when no rank is there to get them: before the first epoch, in a recovery."""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import LabFactory
from holds import (
    IN_PLACE,
    SECOND_COPY,
    firewall,
    heard_of,
    held_back,
    let_go,
    ranks,
    ready,
    wait_held,
)
from jobs import Training, prepared

from lab import Lab

WITNESS = """
import os, signal, sys, time
rank, epoch = os.environ["SLURM_PROCID"], os.environ["ROBUST_EPOCH"]
def got(number, frame):
    with open("got." + rank, "a") as file:
        print(epoch, signal.Signals(number).name, file=file)
time.sleep(0.5)  # as imports take their time
signal.signal(signal.SIGUSR2, got)
if sys.argv[1:] == [rank] and epoch == "1":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def start_witness(lab: Lab, held: str, *argv: str, robust: str = "") -> Training:
    """Two ranks that write down the signals they get, and a node where nothing can start."""
    training = prepared(lab, 2)
    (training.dir / "witness.py").write_text(WITNESS)
    words = ["robust-srun", held_back(training, held), robust, "python", "witness.py", *argv]
    training.submit(" ".join(words), ["-N2", "--ntasks-per-node=1"])
    wait_held(training)
    return training


def tell(training: Training, how: str, name: str) -> None:
    """Send a signal to robust-srun, or by Slurm to the step."""
    if how == "robust-srun":
        (process,) = training.processes("/robust-srun ")
        os.kill(process.pid, getattr(signal, f"SIG{name}"))
    else:
        training.lab.exec("head", ["scancel", "-s", name, f"{training.job}.0"], check=True)


def each_got(training: Training, *expected: str) -> bool:
    paths = sorted(training.dir.glob("got.*"))
    return [path.read_text().splitlines() for path in paths] == [list(expected)] * 2


def witnessed(training: Training, *expected: str) -> None:
    """Both ranks got these signals, once each, and the job ended well."""
    training.until(lambda: each_got(training, *expected), "the signal", 20.0)
    time.sleep(SECOND_COPY)
    (training.dir / "end").touch()
    assert training.wait_end() == 0, training.story()
    assert each_got(training, *expected), training.story()
    training.check_gone()
    assert not training.in_memory()


@pytest.mark.parametrize("how", ["robust-srun", "the step"])
def test_signal_before_the_first_epoch_is_kept(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = start_witness(lab, "n2")
    heard_of(training, "n1")
    if how == "the step":  # which kills what is not started yet: so let n2 only not be heard of
        firewall(lab, "n2", "egress")
        let_go(training)
        training.until(lambda: ready(training, "n2"), "robust-task on n2")
    tell(training, how, "USR2")
    assert not training.events("epoch")
    let_go(training)
    lab.exec("n2", ["tc", "qdisc", "del", "dev", "eth0", "clsact"], user=False)
    witnessed(training, "1 SIGUSR2")
    assert not training.incidents()


@pytest.mark.parametrize("how", ["robust-srun", "the step"])
def test_signal_during_a_recovery_is_kept(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(nodes=2)
    training = start_witness(lab, "s1", "1", robust="--robust-standby-wait=10")
    training.until(lambda: not ranks(training), "end of the first epoch's ranks")
    tell(training, how, "USR2")
    witnessed(training, "2 SIGUSR2")
    training.only_incident(action="restart", why=IN_PLACE, outcome="recovered")


@pytest.mark.parametrize(
    ("how", "name", "code"),
    [("robust-srun", "TERM", 143), ("the step", "TERM", 143), ("the step", "KILL", 137)],
)
def test_job_that_is_ended_before_the_first_epoch(
    new_lab: LabFactory, how: str, name: str, code: int
) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = start_witness(lab, "n2")
    heard_of(training, "n1")
    tell(training, how, name)
    assert training.wait_end(15.0) == code, training.story()
    training.check_gone()
    assert not training.events("epoch") and not list(training.dir.glob("got.*"))
    assert not training.in_memory() or name == "KILL"
