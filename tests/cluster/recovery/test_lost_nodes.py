"""Nodes that are lost or bad: a spare or a standby node takes over, and nobody else leaves."""

from __future__ import annotations

from typing import Any

from conftest import LabFactory
from holds import tasks
from jobs import Training, check_incident, start
from waiting import until

from lab import Cluster
from robust_slurm.drain_reason import parse_reason
from robust_slurm.settings import Config

MUTE = Config().mute_limit


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
    """The incident has the other node's error counters that grew, too: of a link, and of a GPU."""
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
    training = start(lab, 2, spares=1, toy="--hold 30")
    training.wait_step(30)  # the job's pace is known
    lab.hang("n2")
    training.until(training.incidents, "incident")
    training.until(lambda: training.nodes() == "n[1,3]", "shrink")
    lab.crash("n2")  # its processes cannot end by themselves any more
    training.check_done()
    record = training.only_incident(action="swap_spare", swaps=[["n2", "n3"]], cause="shared")
    assert MUTE <= record["phases"]["detect"] < 2 * MUTE
    assert not training.accusations()  # a paused machine or a frozen cgroup looks the same


def test_node_that_is_cut_off_ends_its_ranks(new_lab: LabFactory) -> None:
    """The node ends nothing else: to its agent the batch host seems lost. When the network is
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
