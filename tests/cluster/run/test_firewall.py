"""A firewall between the nodes: robust-srun cannot ask a silent node by a second way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
from conftest import LabFactory
from holds import connection_of, firewall, shims, tasks
from jobs import Training, check_incident, reference, start
from waiting import until

from robust_slurm.settings import AFTER_SUPERVISOR, Config

MUTE = Config().mute_limit
LOST_HOST = Config().outage_wait + AFTER_SUPERVISOR


def behind_firewall(training: Training, node: str) -> None:
    """Wait until robust-srun has noticed that its second way to the node is closed."""

    def noticed() -> bool:
        news = [event["text"] for event in training.events("news")]
        return any(text.startswith(f"{node}: port ") and "yet it reports" in text for text in news)

    training.until(noticed, f"notice that {node} is behind a firewall")


def kill_shims(training: Training) -> None:
    for pid in tasks(training, "n2"):  # with its guardian, which would start it once more
        with contextlib.suppress(ProcessLookupError):  # its guardian ends with it
            os.kill(pid, signal.SIGKILL)


FATAL: dict[str, Callable[[Training], object]] = {
    "node": lambda training: training.lab.crash("n2"),
    "robust-task": kill_shims,
}


@pytest.mark.parametrize("what", FATAL)
def test_death_behind_a_firewall_is_seen(new_lab: LabFactory, what: str) -> None:
    lab = new_lab(standby=0)
    firewall(lab, "n2")
    training = start(lab, 2, spares=1, toy="--hold 8")
    behind_firewall(training, "n2")
    training.wait_step(8)
    FATAL[what](training)
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": training.steps, "loss": reference(training.steps, 2)}
    training.check_gone()
    record = training.incidents()[-1]  # rank 0 may be the first to notice
    check_incident(record, symptom="node_lost", suspects=[], swaps=[["n2", "n3"]])
    assert (
        not training.accusations()
    )  # nobody can tell a dead node there from a stopped robust-task
    assert MUTE <= record["phases"]["detect"] < 2 * MUTE
    assert "answers" not in record["evidence"][0]  # nobody has asked it


def stop_for_a_while(training: Training) -> None:
    (agent,) = shims(training, "n2")
    os.kill(agent, signal.SIGSTOP)
    time.sleep(4.0)  # noticed, and yet too short to be a loss
    os.kill(agent, signal.SIGCONT)


def cut_for_a_while(training: Training) -> None:
    training.lab.partition("n2")
    time.sleep(0.2 * LOST_HOST)  # the agent has not given robust-srun's host up yet
    training.lab.ask("heal", node="n2")


def reset(training: Training) -> None:
    """Break the agent's connection."""
    old, peer, _ = connection_of(training, "n2")
    argv = ["ss", "-K", "-tn", "src", old, "dst", peer]
    if old not in training.lab.exec("n2", argv, user=False).stdout:
        pytest.skip("this kernel breaks no connections (CONFIG_INET_DIAG_DESTROY)")
    until(lambda: connection_of(training, "n2")[0] not in ("", old), "new connection")


STUMBLES = {"stopped": stop_for_a_while, "cut": cut_for_a_while, "reset": reset}


@pytest.mark.parametrize("how", STUMBLES)
def test_stumble_behind_a_firewall_costs_nothing(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(standby=0)
    firewall(lab, "n2")
    training = start(lab, 2, spares=1, steps=200)
    behind_firewall(training, "n2")
    training.wait_step(8)
    STUMBLES[how](training)
    training.check_done()
    assert not training.incidents() and not training.accusations()
    assert training.rosters()[-1]["epoch"] == 1


@pytest.mark.parametrize("option", ["", "-s TERM"])
def test_cancelled_step_stays_cancelled_behind_a_firewall(new_lab: LabFactory, option: str) -> None:
    lab = new_lab()
    firewall(lab, "n3")
    training = start(lab, 3, steps=3000)
    behind_firewall(training, "n3")
    lab.crash("n2")
    training.until(training.incidents, "recovery")
    # From 24.11 scancel fails with a signal that did not reach the crashed node, too.
    lab.exec("head", ["scancel", *option.split(), f"{training.job}.0"])
    assert training.wait_end(30) == 128 + (signal.SIGTERM if option else signal.SIGKILL)
    assert len(training.incidents()) == 1, training.story()
    training.check_gone()
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "end of the standby node")
