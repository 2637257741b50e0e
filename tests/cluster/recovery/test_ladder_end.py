"""Jobs that cannot go on as they are: the end of the ladder, its exit codes, the requeue."""

from __future__ import annotations

import pytest
from conftest import LabFactory
from jobs import Training, check_incident, prepared, start
from waiting import until

from lab import Cluster, Lab

SOON = 40.0  # s; plain Slurm needs 121 s and more
QUICK_LOSS = "--robust-outage-wait=5"  # agents give an unreachable batch host up after 10 s


def stopped(training: Training, code: int, incidents: int) -> None:
    """The job has ended for good with this code, after so many incidents."""
    assert training.wait_end() == code, training.story()
    found = training.incidents()
    assert len(found) == incidents, training.story()
    assert found[-1]["action"] == "stop" and found[-1]["outcome"].startswith("stopped: ")
    check_incident(found[-1])
    assert training.says("^robust-srun: stopped: ")
    assert training.rosters()[-1]["state"] == "failed"
    record = training.lab.job(training.job)
    assert record["Restarts"] == "0" and record["JobState"] in ("FAILED", "COMPLETING")
    training.check_gone()
    assert not training.in_memory()


# -- stop -------------------------------------------------------------------------------------


def test_the_programs_own_error_stops_the_job(lab: Cluster) -> None:
    training = start(lab, 2, toy="--fault raise --at 8 --epoch 0")
    stopped(training, code=1, incidents=2)
    first, second = training.incidents()
    check_incident(first, symptom="crash", cause="user", action="restart")
    check_incident(second, symptom="crash", cause="user", suspects=[])
    # The user has the rank's own words, once for each run of it: they are not repeated.
    assert training.out().splitlines().count("ValueError: bad sample 8") == 2, training.story()
    assert not training.says("^robust-srun: last output of rank ")
    assert not training.accusations()


def test_last_words_that_are_in_another_file(lab: Cluster) -> None:
    training = start(lab, 2, robust="--error=err-%t", toy="--fault raise --at 8 --epoch 0")
    stopped(training, code=1, incidents=2)
    said = training.out().rpartition("robust-srun: last output of rank ")[2]
    trace = said.partition("Traceback (most recent call last):")[2]
    assert "ValueError: bad sample 8" in trace.splitlines()


def test_rank_that_always_exits_with_a_code(lab: Cluster) -> None:
    training = start(lab, 1, 2, toy="--fault exit --at 8 --epoch 0")
    stopped(training, code=3, incidents=2)


def test_command_that_does_not_exist(lab: Cluster) -> None:
    training = prepared(lab, 2)
    training.submit("srun no-such-command; echo srun $?; robust-srun no-such-command", ["-N2"])
    stopped(training, code=2, incidents=1)
    assert training.says("^srun 2$") and training.says("cannot run 'no-such-command'")


def test_restarts_without_progress_are_limited(lab: Cluster) -> None:
    robust = "--robust-max-restarts=2 --robust-standby-partition="
    training = start(lab, 2, toy="--fault kill --at 3 --epoch 0", robust=robust)
    stopped(training, code=128 + 9, incidents=3)
    assert training.says("2 recoveries in a row brought no progress")


def test_nothing_left_and_no_requeue(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = start(lab, 2, robust="--robust-requeue=never", toy="--hold 8")
    training.wait_step(8)
    lab.crash("n2")
    stopped(training, code=121, incidents=1)
    assert training.says("no partition 'standby'")
    check_incident(training.incidents()[0], symptom="node_lost", cause="node", suspects=["n2"])
    assert training.accusations()["n2"]["evidence"]


def test_interactive_job_cannot_be_requeued(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = prepared(lab, 2)
    out = (training.dir / "out").open("w")
    line = training.line(["--robust-standby-partition="], ["--hold", "8"])
    salloc = ["salloc", "--no-kill", "-N2", "bash", "-c", line]
    process = lab.popen("head", salloc, env=training.exports(), stdout=out, stderr=out)
    try:
        training.wait_step(8)
        training.job = int(next((training.state / "jobs").iterdir()).name)
        lab.crash("n2")
        assert process.wait(60) == 121, training.story()
    finally:
        process.terminate()
        out.close()
    assert training.incidents()[-1]["action"] == "stop"
    training.check_gone()


# -- requeue ----------------------------------------------------------------------------------


def goes_on_without(training: Training, bad: str, crashed: float) -> None:
    """The job runs again soon, elsewhere, and its training ends as if nothing had been."""
    training.until(lambda: len(training.runs()) > 1, "second run", SOON)
    again = next(e for e in training.events("epoch") if e["time"] > crashed)
    assert again["time"] - crashed < SOON and bad not in again["nodes"]
    record = training.lab.job(training.job)
    assert bad in record["ExcNodeList"] and record["Restarts"] == "1"
    training.check_done()


def test_standby_exhausted_then_requeued(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3)
    hog = lab.sbatch("#!/bin/sh\nexec sleep 600\n", ["-p", "standby", "--exclusive"])
    lab.wait_job(hog, "RUNNING")
    training = start(lab, 2, robust="--robust-standby-wait=2", toy="--hold 8")
    training.wait_step(8)
    crashed = lab.crash("n2")
    training.until(training.incidents, "incident")
    record = training.incidents()[0]
    check_incident(record, symptom="node_lost", action="requeue", outcome="requeued")
    assert 1.9 < record["phases"]["total"] - record["phases"]["detect"] < 15  # it waited, not long
    assert training.says(r"partition standby gave 0 of 1 nodes in \d+\.\d s \(none became free\)")
    goes_on_without(training, "n2", crashed)
    assert training.runs()[1] == ["n1", "n3"]
    assert training.accusations()["n2"]["evidence"]


def test_standby_disabled_then_requeued(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3, standby=0)
    robust = "--robust-standby-partition="
    training = start(lab, 2, 2, robust=robust, sbatch="--no-requeue --array=7", toy="--hold 8")
    training.wait_step(8)
    crashed = lab.crash("n2")
    goes_on_without(training, "n2", crashed)
    record = training.only_incident(action="requeue", suspects=["n2"], outcome="requeued")
    assert record["phases"]["replace"] < 20  # less than it would wait for a standby node


def jobs_named(lab: Lab, name: str) -> set[int]:
    listing = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"]
    return {int(word) for word in lab.exec("head", listing, check=True).stdout.split()}


def goes_on_as_another_job(training: Training, bad: list[str], crashed: float) -> None:
    """Exactly one new job of the name "alone" runs soon, without the bad nodes, to its end."""
    lab, old = training.lab, training.job
    training.until(lambda: jobs_named(lab, "alone") > {old}, "new job", SOON)
    (training.job,) = jobs_named(lab, "alone") - {old}
    training.until(training.runs, "run of the new job", SOON)
    event = training.events("epoch")[0]
    assert event["time"] - crashed < SOON and not set(bad) & set(event["nodes"])
    training.check_done()
    excluded = lab.exec(
        "head", ["scontrol", "show", "hostnames", lab.job(training.job)["ExcNodeList"]]
    )
    assert excluded.stdout.split() == bad
    until(lambda: lab.job(old)["JobState"] in ("CANCELLED", "COMPLETING"), "end of the old job")
    assert lab.job(old)["Restarts"] == "0"
    assert jobs_named(lab, "alone") == {old, training.job}


@pytest.mark.parametrize("spares", [0, 1])
def test_batch_host_lost(new_lab: LabFactory, spares: int) -> None:
    lab = new_lab(nodes=4)
    training = start(
        lab, 3 - spares, spares=spares, robust=QUICK_LOSS, sbatch="-J alone", toy="--hold 8"
    )
    training.wait_step(8)
    crashed = lab.crash("n1")
    goes_on_as_another_job(training, ["n1"], crashed)


def test_batch_host_lost_with_only_a_standby_node_left(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4)
    training = start(lab, 2, 2, robust=QUICK_LOSS, sbatch="-J alone", toy="--hold 8,20")
    training.wait_step(8)
    lab.crash("n2")
    training.wait_says("s1 took the ranks of n2")
    crashed = lab.crash("n1")
    training.go_on()
    goes_on_as_another_job(training, ["n1", "n2"], crashed)


def test_nothing_left_for_a_second_lost_node(new_lab: LabFactory) -> None:
    """22.05 takes no second update of a job, so a requeue of it would take minutes."""
    lab = new_lab(nodes=5, standby=0)
    training = start(lab, 2, spares=1, sbatch="-J alone", toy="--hold 8,20")
    training.wait_step(8)
    lab.crash("n2")
    training.wait_says("n3 took the ranks of n2")
    training.until(lambda: training.events("released"), "release of n2")
    crashed = lab.crash("n3")
    training.go_on()
    training.until(lambda: len(training.incidents()) == 2, "record")
    check_incident(training.incidents()[1], action="requeue", outcome="requeued")
    if lab.spec.slurm == "22.05":
        training.wait_says("robust-srun: .* it continues as job ")
        goes_on_as_another_job(training, ["n2", "n3"], crashed)
    else:
        goes_on_without(training, "n3", crashed)
        assert not {"n2", "n3"} & set(training.runs()[-1])
