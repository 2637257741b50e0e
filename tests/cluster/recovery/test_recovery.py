"""Faults from which a training goes on inside its job: restart, spare, standby node."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from conftest import LabFactory
from holds import tasks
from jobs import TOY, Training, check_incident, prepared, reference, start
from waiting import until

from lab import Cluster
from robust_slurm.drain_reason import parse_reason

# The limit is ten times the longest time between two reports with a step, and at least the floor.
QUICK_HANG = "--robust-hang-floor=2 --robust-interval=0.2"


def evicted(training: Training, node: str, left: str) -> None:
    """The node has been released from the running job, and stands accused with evidence."""
    training.until(lambda: training.nodes() == left, f"node list {left}", 10.0)
    record = training.accusations()[node]
    assert record["job"] == training.job and record["evidence"], record
    assert record["user"] == training.lab.user and record["time"] > 0


def roles(training: Training) -> dict[str, str]:
    """Node -> its role in the newest roster."""
    nodes: list[dict[str, Any]] = training.rosters()[-1]["nodes"]
    return {node["name"]: node["role"] for node in nodes}


# -- a rank dies: restart in place ------------------------------------------------------------


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


# -- a node is lost: spare, standby node ---------------------------------------------------------


def test_spare_takes_over(new_lab: LabFactory) -> None:
    lab = new_lab()
    training = start(lab, 2, 2, spares=1, toy="--hold 8")
    training.wait_step(8)
    assert roles(training) == {"n1": "active", "n2": "active", "n3": "spare"}
    lab.crash("n2")
    training.wait_says("recovered from")
    evicted(training, "n2", left="n[1,3]")
    training.check_done()
    record = training.only_incident(
        symptom="node_lost",
        cause="node",
        action="swap_spare",
        suspects=["n2"],
        swaps=[["n2", "n3"]],
        outcome="recovered",
    )
    assert record["lost_steps"] <= 5 and record["phases"]["detect"] < 8
    assert "n3 took the ranks of n2" in training.out()
    assert training.says("^rank 2 done on n3 in epoch 2")
    assert roles(training) == {"n1": "active", "n2": "dead", "n3": "active"}


def test_an_operators_job_drains_the_bad_node(new_lab: LabFactory) -> None:
    lab = new_lab(standby=0)
    training = start(lab, 2, spares=1, robust="--robust-drain=direct", user=False, toy="--hold 8")
    training.wait_step(8)
    lab.crash("n2")
    training.wait_says("recovered from")
    until(lambda: "DRAIN" in lab.nodes()["n2"], "n2 drained")
    record = lab.node_records()["n2"]
    reason = parse_reason(record["Reason"])
    assert reason == ("node", "node-lost", "", "none", training.job), record["Reason"]
    training.check_done()
    until(lambda: lab.nodes()["n1"] == lab.nodes()["n3"] == {"IDLE"}, "the others untouched")


def test_standby_node_takes_over_with_its_gpus(new_lab: LabFactory) -> None:
    """And the incident has the error counters of the other node that grew: of a link, and a GPU."""
    lab = new_lab(nodes=2, gpus=2)
    training = start(lab, 2, 2, sbatch="--gres=gpu:h100:2", toy="--hold 8")
    training.wait_step(8)
    lab.link("n1", up=False, port="mlx5_1")
    lab.link("n1", up=True, port="mlx5_1")
    lab.gpu("n1", 1, ecc=1, set={"nvlink4.crc_flit": 6})
    lab.crash("n2")
    training.wait_says("recovered from")
    evicted(training, "n2", left="n1")
    training.check_done()
    record = training.only_incident(action="swap_standby", suspects=["n2"], swaps=[["n2", "s1"]])
    grown = [
        "GPU 0000:43:00.0 uncorrected ECC errors +1",
        "mlx5_1 port 1 link_downed +1",
        "GPU 0000:43:00.0 NVLink 4 crc_flit errors +6",
    ]
    assert record["counters"] == [f"n1: {line} since robust-task began there" for line in grown]
    assert training.says("^rank 3 done on s1 in epoch 2 gpus 0,1")
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "standby node given back")


def test_standby_node_gets_as_many_slots_as_its_place(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4)
    # Ranks 0 and 1 on n2, one each on n3 and n4; the batch host n1 has none.
    robust = "-N3 -n4 --relative=1"
    training = start(lab, 4, robust=robust, sbatch="--ntasks-per-node=2", world=4, toy="--hold 8")
    training.wait_step(8)
    lab.crash("n2")  # rank 0, the master, is on it
    training.check_done()
    training.only_incident(action="swap_standby", swaps=[["n2", "s1"]])
    assert training.says("^rank 0 done on s1") and training.says("^rank 1 done on s1")


def test_node_lost_during_the_recovery(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4)
    training = start(lab, 3, spares=1, toy="--hold 8")
    training.wait_step(8)
    lab.crash("n2")
    training.until(lambda: training.events("failure"), "failure noticed")
    lab.crash("n3")
    training.check_done()
    found = training.incidents()
    assert found[-1]["outcome"] == "recovered"
    swaps = [tuple(pair) for record in found for pair in record["swaps"]]
    assert len(swaps) >= 2 and {old for old, _ in swaps} >= {"n2", "n3"}
    assert {name for name, role in roles(training).items() if role == "active"} == {
        "n1",
        "n4",
        "s1",
    }
    assert set(training.accusations()) == {"n2", "n3"}


def test_two_crashes_one_after_another(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4, standby=0)
    training = start(lab, 2, spares=2, toy="--hold 8,30")
    for count, (victim, step) in enumerate([("n2", 8), ("", 30)], start=1):
        training.wait_step(step)
        taken = victim or training.incidents()[0]["swaps"][0][1]
        lab.crash(taken)
        training.wait_says(rf"(recovered from(.|\n)*){{{count}}}")
    training.check_done()
    found = training.incidents()
    assert [i["action"] for i in found] == ["swap_spare", "swap_spare"]
    assert found[0]["swaps"][0][1] == found[1]["swaps"][0][0]


def test_spare_that_dies_idle_disturbs_nobody(new_lab: LabFactory) -> None:
    lab = new_lab()
    training = start(lab, 2, spares=1, robust="--robust-verbose", toy="--hold 8")
    training.wait_step(8)
    lab.crash("n3")
    training.wait_says("n3 is lost")
    assert not training.incidents()
    lab.crash("n2")
    training.check_done()
    training.only_incident(action="swap_standby", swaps=[["n2", "s1"]])


def test_node_whose_processes_all_stop(new_lab: LabFactory) -> None:
    lab = new_lab()
    training = start(lab, 2, spares=1, toy="--hold 8")
    training.wait_step(8)
    lab.hang("n2")
    training.until(training.incidents, "incident")
    training.until(lambda: training.nodes() == "n[1,3]", "shrink")
    lab.crash("n2")  # its processes cannot end by themselves any more
    training.check_done()
    training.only_incident(action="swap_spare", suspects=["n2"], cause="node")


def test_node_that_is_cut_off_ends_its_ranks(new_lab: LabFactory) -> None:
    """And nothing else: to its agent it looks as if the batch host were lost. When the network is
    back, the job has gone on without this node, and is not brought back a second time."""
    lab = new_lab()
    training = start(lab, 2, spares=1, robust="--robust-outage-wait=0", steps=800)
    training.wait_step(8)
    before = {p.pid for p in training.processes("toy.py", rank=1)}

    def asked_slurm(words: str) -> bool:
        return any(words in event["text"] for event in training.events("supervisor_gone"))

    lab.partition("n2")
    training.wait_says("recovered from")
    training.until(
        lambda: not before & {p.pid for p in training.processes("toy.py")}, "end of the cut ranks"
    )
    training.until(lambda: asked_slurm("Slurm does not answer"), "n2 wants to bring the job back")
    lab.reconnect("n2")
    training.until(lambda: not tasks(training, "n2"), "the end of the cut agent")
    step = int(training.out().rpartition("\nstep ")[2].split()[0])
    training.wait_step(step + 10)
    training.only_incident(action="swap_spare", swaps=[["n2", "n3"]])
    assert training.nodes() == "n[1,3]" and not asked_slurm("goes on as job")


def test_job_without_no_kill_is_warned_and_recovers(new_lab: LabFactory) -> None:
    lab = new_lab()
    training = start(lab, 2, spares=1, no_kill=False, toy="--hold 8")
    training.wait_step(8)
    assert training.says("^robust-srun: warning: .*#SBATCH --no-kill$")
    lab.crash("n2")
    training.wait_says("recovered from")
    evicted(training, "n2", left="n[1,3]")
    training.check_done()


def test_uncorrectable_memory_error_costs_the_node_at_once(new_lab: LabFactory) -> None:
    lab = new_lab()
    training = start(lab, 2, spares=1, toy="--fault ecc --at 8")
    training.check_done()
    record = training.only_incident(
        symptom="crash", cause="node", action="swap_spare", suspects=["n2"]
    )
    assert any("GPU's memory" in line for line in record["evidence"])
    assert any("GPU's memory" in line for line in training.accusations()["n2"]["evidence"])


def test_an_error_on_all_nodes_costs_none(lab: Cluster) -> None:
    training = start(lab, 2, 2, spares=1, toy="--fault ecc --at 8 --rank -1")
    training.check_done()
    record = training.only_incident(symptom="crash", cause="shared", action="restart", swaps=[])
    assert any("the same error on n" in line for line in record["evidence"])
    assert not training.accusations()


def test_an_error_that_the_replacement_shows_as_well_is_withdrawn(lab: Cluster) -> None:
    training = start(lab, 2, spares=1, toy="--fault ecc --at 8 --epoch 1,2 --save 100")
    training.check_done()
    first, second = training.incidents()
    check_incident(first, cause="node", action="swap_spare", suspects=["n2"])
    check_incident(second, cause="shared", action="restart", suspects=[], swaps=[])
    assert set(training.accusations()) == set(training.withdrawals()) == {"n2"}
    assert "the same error on n2, n3" in training.withdrawals()["n2"]["withdrawn"]
    assert training.says("^robust-srun: the report against n2 is withdrawn: the same error on ")


# -- hangs ------------------------------------------------------------------------------------


def test_stopped_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault stop --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart", suspects=["n1"])
    assert record["phases"]["detect"] > 1.5
    assert any("rank 1 is stopped" in line for line in record["evidence"])


def test_sleeping_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault sleep --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart")
    assert any("no rank did anything" in line for line in record["evidence"])


@pytest.mark.parametrize(
    "toy",
    ["--fault phase --at 25", "--fault busy --at 25", "--fault pause --at 1"],
    ids=["phase", "unmarked evaluation", "slow first step"],
)
def test_no_false_alarm(lab: Cluster, toy: str) -> None:
    training = start(lab, 2, 2, toy=f"{toy} --seconds 5", robust=QUICK_HANG, steps=35)
    training.check_done()
    assert not training.incidents()
    assert training.rosters()[-1]["epoch"] == 1


def test_ranks_that_end_some_seconds_apart_are_no_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault linger --rank 3 --seconds 8", robust=QUICK_HANG)
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_commands_that_outlive_their_training_are_no_hang(lab: Cluster) -> None:
    """A shell uploads when its program has ended well; torchrun waits for its other ranks."""
    training = prepared(lab, 2)
    script = training.dir / "run.sh"
    words = f"python {TOY} --dir {training.dir} --steps {training.steps}"
    script.write_text(f"{words} || exit 1\nsleep 8\n")
    training.submit(f"robust-srun {QUICK_HANG} bash {script}", ["-N2", "--ntasks-per-node=1"])
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_node_that_hangs_twice_is_swapped(new_lab: LabFactory) -> None:
    lab = new_lab()
    toy = "--fault stop --at 25 --epoch 0 --node n2 --rank 2 --save 100"  # back to step 1
    training = start(lab, 2, 2, spares=1, toy=toy, robust=QUICK_HANG)
    training.check_done()
    first, second = training.incidents()
    check_incident(first, symptom="hang", action="restart", suspects=["n2"])
    check_incident(second, symptom="hang", action="swap_spare", swaps=[["n2", "n3"]])
    assert training.accusations()["n2"]["symptom"] == "hang"


# -- the supervisor, the state directory ------------------------------------------------------


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
    assert training.says(r"^robust-srun: \d+ records were not written: ")
