"""A Slurm with slurmdbd: accounts, limits and QOS are enforced, and everything is accounted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from jobs import WAIT, Training, start
from pool_lab import Pool
from waiting import until

from lab import Cluster, LabError
from lab.slurm import accounting

try:
    accounting.check_programs()
except LabError as missing:
    pytest.skip(f"{missing}", allow_module_level=True)


class Accounted(NamedTuple):
    """A job as sacct has it."""

    job: str
    account: str
    user: str
    qos: str
    partition: str
    nodes: str
    state: str


def sacct(lab: Cluster, *words: str) -> list[Accounted]:
    fields = "jobid,account,user,qos,partition,nodelist,state"
    argv = ["sacct", "-a", "-X", "-n", "-P", f"--format={fields}", "--duplicates", *words]
    done = lab.exec("head", argv, user=False, check=True)
    return [Accounted(*line.split("|")) for line in done.stdout.splitlines()]


def sacctmgr(lab: Cluster, line: str) -> None:
    lab.exec("head", ["sacctmgr", "-i", *line.split()], user=False, check=True)


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with Cluster(nodes=4, standby=2, accounting=True) as lab:
        sacctmgr(lab, "add qos pool")
        sacctmgr(lab, "add qos long")
        sacctmgr(lab, f"modify user {lab.user} set qos=normal,long,pool")
        yield lab


@pytest.fixture
def slurm(made: Cluster) -> Iterator[Cluster]:
    """The module's lab, its nodes in order and without limits."""
    yield made
    for node, fault in made.faults().items():
        if fault != "up":
            made.heal(node)
    limit(made, "long", -1)
    limit(made, "pool", -1)


def limit(lab: Cluster, qos: str, nodes: int) -> None:
    """Limit the nodes that a user may have in the QOS at once; -1: no limit."""
    sacctmgr(lab, f"modify qos {qos} set MaxTRESPerUser=node={nodes}")


def test_the_database_is_roots_alone(made: Cluster) -> None:
    look = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/mysqld/mysqld.sock')"
    done = made.exec("head", ["python3", "-c", look])
    assert "PermissionError" in done.stderr
    done = made.exec("head", ["python3", "-c", look], user=False)
    assert done.returncode == 0, done.stderr
    listening = made.exec("head", ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    assert f":{3306:04X} " not in listening and f":{6819:04X} " in listening


def test_a_standby_node_is_accounted_to_the_jobs_owner(slurm: Cluster) -> None:
    training = start(slurm, 2, toy="--hold 8", sbatch="--account=lab --qos=long")
    training.wait_step(8)
    slurm.crash("n2")
    training.wait_says("recovered from")
    training.check_done()
    ((_, came),) = training.incidents()[0]["swaps"]

    def of_the_standby_node() -> list[Accounted]:
        return sacct(slurm, f"--name=robust-standby-{training.job}")

    until(of_the_standby_node, "the standby allocation in the accounts", WAIT)
    (standby,) = of_the_standby_node()
    assert standby[1:6] == ("lab", slurm.user, "long", "standby", came)
    until(lambda: of_the_standby_node()[0].state == "COMPLETED", "its end in the accounts", WAIT)
    own = [one for one in sacct(slurm) if one.job == str(training.job)]
    assert [(one.nodes, one.state) for one in own] == [("n[1-2]", "RESIZING"), ("n1", "COMPLETED")]
    agrees_with_sacct(slurm, training)


def agrees_with_sacct(lab: Cluster, training: Training) -> None:
    """robust-status counts each second that sacct has of the job, and the incident as recorded."""
    argv = ["sacct", "-a", "-X", "-n", "-P", "-D", "--format=start,end", "-j", str(training.job)]
    seconds = {"SLURM_TIME_FORMAT": "%s"}
    lines = lab.exec("head", argv, user=False, env=seconds, check=True).stdout.split()
    times = [float(time) for line in lines for time in line.split("|")]
    argv = ["robust-status", "--state-dir", str(training.state), str(training.job), "--accounts"]
    found = json.loads(lab.exec("head", [*argv, "--json"], check=True).stdout)
    assert found["problems"] == []
    (job,) = found["jobs"]
    assert abs(job["elapsed_s"] - (max(times) - min(times))) <= 1.0
    spent = {row["name"]: row["seconds"] for row in job["by_phase"]}
    assert spent["script"] >= 0 and abs(sum(spent.values()) - job["unproductive_s"]) < 0.001
    phases = training.incidents()[0]["phases"]
    total = phases.pop("total")
    assert abs(sum(spent.get(phase, 0.0) for phase in phases) - total) <= 1.0


def test_a_limit_that_keeps_the_standby_node_away_is_told(slurm: Cluster) -> None:
    limit(slurm, "long", 2)
    robust = "--robust-standby-wait=5"
    training = start(slurm, 2, toy="--hold 8", sbatch="--qos=long", robust=robust)
    training.wait_step(8)
    slurm.crash("n2")
    training.wait_says(r"gave 0 of 1 nodes in \d+\.\d s \(Slurm's reason: QOSMaxNodePerUserLimit\)")
    training.until(lambda: len(training.runs()) == 2, "second run of the job", WAIT)
    training.check_done()


def test_the_pools_own_qos_goes_before_the_jobs(slurm: Cluster) -> None:
    """A user who may have no more nodes may have standbys, as many as the pool's QOS says."""
    pool = Pool(slurm, "s1", "s2")
    limit(slurm, "long", 2)
    limit(slurm, "pool", 1)
    pool.run("apply", "--yes", "--nodes", "s[1-2]", "--qos", "pool")
    assert pool.partition("standby")["QoS"] == "pool"
    robust = "--robust-standby-wait=5"
    training = start(slurm, 2, toy="--hold 8", sbatch="--qos=long", robust=robust)
    training.wait_step(8)
    slurm.crash("n2")
    training.wait_says("recovered from")
    training.check_done()
    ((lost, came),) = training.incidents()[0]["swaps"]
    assert lost == "n2" and came in ("s1", "s2")
    pool.run("apply", "--yes", "--qos", "none")
    assert pool.partition("standby")["QoS"] == "N/A"


def test_a_slurmdbd_that_is_gone_keeps_nobody_from_going_on() -> None:
    with Cluster(nodes=4, standby=0, accounting=True) as lab:
        training = start(lab, 2, spares=1, toy="--hold 8", sbatch="--account=lab")
        training.wait_step(8)
        lab.exec("head", ["sacctmgr", "shutdown"], user=False, check=True)
        until(lambda: "slurmdbd ended" in lab.spec.log("keeper").read_text(), "its end")
        lab.crash("n2")
        training.check_done()
        assert training.only_incident(action="swap_spare")["swaps"] == [["n2", "n3"]]
