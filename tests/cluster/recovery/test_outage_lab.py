"""Outages that hit many nodes at once, and jobs that slept: a shared cause, no bad nodes."""

from __future__ import annotations

import time

from conftest import LabFactory
from jobs import Training, check_incident, start
from waiting import until

from lab import Cluster


def outage(lab: Cluster, nodes: list[str], seconds: float) -> None:
    """The links of these nodes are down for so long."""
    for node in nodes:
        lab.partition(node)
    time.sleep(seconds)
    for node in nodes:
        lab.ask("heal", node=node)


def undisturbed(training: Training) -> None:
    """Check that the job ended well, where it began, and that no node was blamed."""
    training.check_done()
    assert not training.accusations(), training.story()
    assert all(node["role"] != "dead" for node in training.rosters()[-1]["nodes"])
    assert not any(record["swaps"] for record in training.incidents()), training.story()


def test_a_short_outage_of_the_batch_host_costs_nobody(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4)
    training = start(lab, 4, steps=200)
    training.wait_step(8)
    outage(lab, ["n1"], 2.0)
    undisturbed(training)


def test_nodes_that_stay_unreachable_are_replaced_without_a_report(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4, standby=0)
    training = start(lab, 4, robust="--robust-outage-wait=3", steps=3000)
    training.wait_step(8)
    for node in ("n2", "n3", "n4"):
        lab.crash(node)
    training.until(training.incidents, "incident")
    found = training.incidents()[0]
    check_incident(found, symptom="node_lost", cause="shared", suspects=[], action="requeue")
    assert found["phases"]["detect"] > 2.5
    assert training.says(r"^robust-srun: n\[2-4\] .* waiting up to 3 s "), training.story()
    assert training.says(r"^robust-srun: n\[2-4\] still silent after .* not reported as bad")
    assert not training.accusations()
    until(lambda: lab.job(training.job)["Restarts"] == "1", "requeue")
    assert lab.job(training.job)["ExcNodeList"] in ("", "(null)")


def test_a_lost_node_that_answers_before_it_is_replaced_is_taken_back(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3)
    hog = lab.sbatch("#!/bin/sh\nexec sleep 600\n", ["-p", "standby", "--exclusive"])
    lab.wait_job(hog, "RUNNING")
    training = start(lab, 3, steps=200)
    training.wait_step(8)
    lab.partition("n2")
    training.until(lambda: training.events("failure"), "loss of n2")
    lab.ask("heal", node="n2")
    undisturbed(training)
    training.only_incident(symptom="node_lost", cause="transient", action="restart", swaps=[])


def test_a_job_that_nothing_could_replace_waits_before_it_is_requeued(new_lab: LabFactory) -> None:
    """A requeue would cost minutes, and srun outlives such an outage."""
    lab = new_lab(nodes=2, standby=0)
    training = start(lab, 2, steps=200)
    training.wait_step(8)
    lab.partition("n2")
    training.wait_says("^robust-srun: n2 may only be cut off: waiting up to [789] s for an answer$")
    lab.ask("heal", node="n2")
    undisturbed(training)
    training.only_incident(symptom="node_lost", cause="transient", action="restart", swaps=[])
    assert lab.job(training.job)["Restarts"] == "0"


def test_the_report_against_a_node_that_was_cut_off_for_moments_is_withdrawn(
    new_lab: LabFactory,
) -> None:
    lab = new_lab()
    direct = "--robust-drain=direct"  # as root, as Slurm asks it: the node must not be drained
    training = start(lab, 2, spares=1, robust=direct, user=False, steps=250)
    training.wait_step(8)
    lab.partition("n2")
    training.until(training.accusations, "report against n2")
    lab.reconnect("n2")
    training.until(training.withdrawals, "withdrawal")
    training.wait_says(
        r"^robust-srun: the report against n2 is withdrawn: it answered again after "
    )
    assert training.wait_end() == 0, training.story()
    training.only_incident(action="swap_spare", swaps=[["n2", "n3"]], cause="node")
    assert set(training.accusations()) == set(training.withdrawals()) == {"n2"}
    assert "DRAIN" not in lab.node_records()["n2"]["State"]
    argv = ["robust-status", "--state-dir", str(training.state), "n2"]
    told = lab.exec("head", argv, user=False).stdout
    assert "1 report: 1 withdrawn" in told and "rule node-lost: withdrawn" in told, told


def test_a_job_that_was_suspended_goes_on(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3)
    training = start(lab, 3, steps=150)
    training.wait_step(8)
    for what, pause in (("suspend", 12.0), ("resume", 0.0)):  # longer than outage_wait
        lab.exec("head", ["scontrol", what, str(training.job)], user=False, check=True)
        time.sleep(pause)
    undisturbed(training)
    assert not training.incidents(), training.story()
    assert "Slurm ended the step" not in training.out(), training.story()  # it said so, with 137
