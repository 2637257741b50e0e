"""The pool in a real Slurm: made, used by a training that loses a node, shown, given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import start
from pool_lab import Pool
from waiting import until

from lab import Cluster

PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
ASLEEP = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Cluster(nodes=4, standby=0, slurm_conf=PREEMPTION) as lab:
        yield Pool(lab, "n2", "n3", "n4")


def test_a_standby_node_comes_from_the_pool(pool: Pool) -> None:
    lab = pool.lab
    denied = pool.run("apply", "--yes", "--nodes", "n4", code=1, user=True)
    assert "Permission denied" in denied.stderr

    busy = lab.sbatch(ASLEEP, ["-w", "n4", "-o", "/dev/null"])
    pool.wait_state(busy, "RUNNING")
    words = ["--nodes", "n[1,3-4]", "--size", "2", "--from", "train", "--backfill", "low"]
    done = pool.run("apply", "--yes", *words)
    assert "not admitted: n1: no check is on record" in done.stdout
    assert "joins when its jobs end: n4" in done.stdout
    assert pool.partition("train")["Nodes"] == "n[1-2]"
    assert pool.partition("standby")["Nodes"] == pool.partition("low")["Nodes"] == "n3"
    assert lab.job(busy)["JobState"] == "RUNNING"
    lab.exec("head", ["scancel", str(busy)], check=True)
    until(lambda: lab.job(busy)["JobState"] == "CANCELLED", "its end", 20)
    pool.run("apply", "--yes")
    assert pool.partition("standby")["Nodes"] == "n[3-4]"
    assert pool.use() == {"n3": "free", "n4": "free"} and pool.show(0)["stock"]["short"] == 0

    low = [lab.sbatch(ASLEEP, ["-p", "low", "--exclusive", "-o", "/dev/null"]) for _ in range(2)]
    for job in low:
        pool.wait_state(job, "RUNNING")
    assert sorted(pool.use().values()) == sorted(f"lent to job {job}" for job in low)

    training = start(lab, 2, toy="--hold 8,20")
    training.wait_step(8)
    lab.crash("n2")
    training.until(training.incidents, "its incident")
    ((lost, came),) = training.incidents()[0]["swaps"]
    assert lost == "n2" and came in ("n3", "n4")
    used = pool.use()
    assert used[came].endswith(f", standby of job {training.job}"), used
    assert pool.show(1)["stock"]["short"] == 1
    pool.run("apply", "--yes")
    assert sorted(lab.job(job)["JobState"] for job in low) == ["PENDING", "RUNNING"]
    pool.run("apply", "--yes", "--size", "0")
    assert pool.partition("standby")["Nodes"] == came
    training.go_on()
    training.check_done()

    def given_back() -> bool:
        pool.run("apply", "--yes")
        return pool.partition("train")["Nodes"] == "n[1-4]"

    until(given_back, "the end of its jobs", 40)
    assert pool.partition("standby")["Nodes"] == pool.partition("low")["Nodes"] == "(null)"


def test_what_a_reconfigure_ends_is_told_and_made_again(pool: Pool) -> None:
    lab = pool.lab
    pool.run("apply", "--yes", "--nodes", "n[3-4]", "--from", "train")
    assert "not in slurm.conf" in " ".join(pool.show()["notes"])
    lab.exec("head", ["scontrol", "reconfigure"], user=False, check=True)
    until(lambda: not pool.partition("standby"), "the partition to go", 20)
    assert "create PartitionName=standby" in " ".join(pool.show(1)["differs"])
    applied = pool.run("apply", "--yes").stdout
    assert pool.partition("standby")["Nodes"] == "n[3-4]"

    ours = [line.strip() for line in applied.splitlines()]
    conf = Path(lab.spec.dir / "etc" / "slurm.conf")
    kept = [line for line in conf.read_text().splitlines() if not line.startswith("Partition")]
    train = "PartitionName=train Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP"
    standby = [line for line in ours if line.startswith("PartitionName=standby")]
    conf.write_text("\n".join([*kept, train, *standby]) + "\n")
    lab.exec("head", ["scontrol", "reconfigure"], user=False, check=True)
    until(lambda: pool.partition("standby").get("Nodes") == "n[3-4]", "slurm.conf's own", 20)
    assert pool.show()["notes"] == [n for n in pool.show()["notes"] if "slurm.conf" not in n]
    assert pool.run("apply", "--yes").stdout.startswith("nothing to change")


def test_slurmctld_is_down(pool: Pool) -> None:
    pool.run("apply", "--yes", "--nodes", "n[3-4]", "--from", "train")
    kill = "kill -KILL $(pidof slurmctld)"
    pool.lab.exec("head", ["sh", "-c", kill], user=False, check=True)
    for words in (["show"], ["apply", "--yes"]):
        assert "no slurmctld answers" in pool.run(*words, code=1).stderr
