"""Faults from which a training goes on on its nodes: its ranks restart in place."""

from __future__ import annotations

import os
import shutil

import pytest
from jobs import prepared, reference, start

from lab import Cluster


def test_killed_rank_restarts_in_place(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault kill --at 13", steps=25)
    training.check_done()
    record = training.only_incident(
        symptom="crash", cause="unknown", action="restart", suspects=[], swaps=[], lost_steps=2
    )
    assert record["outcome"] == "recovered" and "rank 1 on " in record["evidence"][0]
    assert "SIGKILL" in record["evidence"][0]
    assert training.out().count("robust-srun: recovered from crash") == 1
    assert training.says(r"^step 11 .*\n(.*\n)*step 11 ")  # steps 11 and 12 were done again
    assert not training.accusations()
    assert "warning" not in training.out()
    roster = training.rosters()[-1]
    assert (roster["state"], roster["epoch"], roster["step"]) == ("completed", 2, 25)


def test_one_rank_alone(lab: Cluster) -> None:
    training = start(lab, 1, toy="--fault kill --at 8 --rank 0", steps=15)
    training.check_done()
    training.only_incident(symptom="crash", action="restart", lost_steps=2)


def test_user_code_without_beats(lab: Cluster) -> None:
    regex = r"--robust-progress-regex='step (\d+)'"
    toy = "--no-beat --fault kill --at 13"
    training = start(lab, 2, toy=toy, robust=regex, steps=40)
    training.check_done()
    said = training.out()  # the line comes when training goes on, not at its end
    assert said.index("recovered from crash") < said.index("step 40 ")
    found = training.only_incident(symptom="crash", action="restart")
    # Rank 0 may be ended before or after it has printed the step that rank 1 had just finished.
    assert found["lost_steps"] in (1, 2)


def test_progress_refills_the_budget(lab: Cluster) -> None:
    toy = "--fault kill --at 6,11,16,21 --once --epoch 0 --save 1"
    training = start(lab, 2, toy=toy, robust="--robust-max-restarts=2", steps=25)
    training.check_done()
    found = training.incidents()
    assert [i["action"] for i in found] == ["restart"] * 4
    assert [i["epoch"] for i in found] == [1, 2, 3, 4]


def test_rank_that_ignores_sigterm(lab: Cluster) -> None:
    # Rank 0 sleeps in its step for longer than the grace: it does not see the broken connection.
    toy = "--fault kill --at 2 --ignore-term --step-time 4 --save 1"
    training = start(lab, 2, toy=toy, robust="--robust-stop-grace=0.3", steps=2)
    training.check_done()
    record = training.only_incident(symptom="crash", action="restart")
    assert 0.25 <= record["phases"]["stop"] < 4


def test_grandchild_that_holds_a_port_is_gone_before_the_restart(lab: Cluster) -> None:
    training = start(lab, 2, toy="--fault grandchild --at 8", steps=20)
    training.check_done()  # toy.py fails in epoch 2 if the port is still held
    training.only_incident(symptom="crash", action="restart")


def test_two_steps_of_one_job_do_not_disturb_each_other(lab: Cluster) -> None:
    one, two = prepared(lab, 2, 30), prepared(lab, 2, 30)
    two.state.symlink_to(one.state)
    half = "-N1 -n2 --exact"
    lines = [one.line([half], ["--fault", "kill", "--at", "8"]) + " & a=$!"]
    lines += [two.line([half], []) + " & b=$!", "wait $a && wait $b"]
    one.submit("\n".join(lines), ["-N2", "--ntasks-per-node=2"])
    two.job = one.job
    one.check_done()
    assert two.final() == {"step": 30, "loss": reference(30, 2)}
    record = one.only_incident(symptom="crash", action="restart")
    states = {r["step_id"]: (r["state"], r["epoch"]) for r in one.rosters()}
    other = {"0": "1", "1": "0"}[record["step_id"]]
    assert states == {record["step_id"]: ("completed", 2), other: ("completed", 1)}
    assert one.says("warning: another robust-srun of this job is running .process [0-9]+ on n1")


def test_two_jobs_on_one_node_do_not_disturb_each_other(lab: Cluster) -> None:
    here = "-w n2 -c1 --oversubscribe"
    jobs = [start(lab, 1, 2, toy=f, sbatch=here) for f in ("--fault kill --at 8", "")]
    for training in jobs:  # check_done() wants the node's memory to be empty, of the other job too
        training.wait_end()
    for training in jobs:
        training.check_done()
    assert [len(training.incidents()) for training in jobs] == [1, 0]


def test_supervisor_that_is_killed_leaves_no_rank(lab: Cluster) -> None:
    training = start(lab, 2, 2, steps=1000)
    training.wait_step(5)
    training.kill("robust-srun")
    training.until(lambda: not training.processes("toy.py"), "end of all ranks", 12.0)
    assert training.wait_end() == 128 + 9
    training.check_gone()
    training = start(lab, 4, steps=5)  # takes away what the killed shims left in memory
    training.check_done()


@pytest.mark.parametrize("how", ["removed", "unwritable"])
def test_state_directory_lost_on_the_way(lab: Cluster, how: str) -> None:
    training = start(lab, 2, toy="--fault kill --at 50", steps=60)
    training.wait_step(5)
    if how == "removed":
        shutil.rmtree(training.state, ignore_errors=True)
        shutil.rmtree(training.state, ignore_errors=True)  # a record may come in between
    else:
        training.job_dir().chmod(0o500)
        os.chown(training.job_dir(), 0, 0)
    training.check_done()
    assert training.says("^robust-srun: recovered from crash")
    assert training.says(r"^robust-srun: \d+ records? not written: \S")
