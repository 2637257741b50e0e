"""robust-status on a live cluster: a training that loses a node, seen from outside."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
from conftest import LabFactory
from jobs import Training, start

from lab import Cluster

QUICK = 20.0  # s; about 0.4 on an idle machine, which this one may not be


def status(lab: Cluster, training: Training, *words: str) -> subprocess.CompletedProcess[str]:
    argv = ["robust-status", "--state-dir", str(training.state), *words]
    began = time.monotonic()
    done = lab.exec("head", argv, timeout=60)
    assert time.monotonic() - began < QUICK
    return done


def report(lab: Cluster, training: Training, *words: str) -> dict[str, Any]:
    done = status(lab, training, "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def test_through_a_node_crash(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3, standby=1)
    training = start(lab, 2, steps=2000, spares=1, toy="--step-time 0.1", sbatch="-J lm")
    training.wait_step(5)
    training.until(lambda: report(lab, training)["jobs"][0]["step"], "a step in the report")

    before = report(lab, training)
    assert before["slurm_error"] == "" and before["problems"] == []
    nodes = by_name(before["nodes"])
    assert {n: row["pool"] for n, row in nodes.items()} == {
        "n1": "train",
        "n2": "train",
        "n3": "train",
        "s1": "standby",
    }
    assert nodes["s1"]["state"] == ["IDLE"] and "IDLE" not in nodes["n1"]["state"]
    assert not any(row["accusations"] for row in nodes.values())
    (job,) = before["jobs"]
    assert (job["job_id"], job["name"], job["user"]) == (training.job, "lm", lab.user)
    assert (job["status"], job["slurm_state"], job["epoch"]) == ("running", "RUNNING", 1)
    assert job["world_size"] == 2 and job["incidents"] == 0 and job["step"] >= 1
    assert 0.05 < job["step_time_s"] < 5 and 0 < job["ettr"] <= 1
    members = by_name(job["nodes"])
    assert {n: m["role"] for n, m in members.items()} == {
        "n1": "active",
        "n2": "active",
        "n3": "spare",
    }

    lab.crash("n2")
    training.until(lambda: training.incidents(), "the incident", 60)

    def goes_on() -> bool:
        (job,) = report(lab, training)["jobs"]
        return (job["epoch"], job["status"]) == (2, "running")

    training.until(goes_on, "epoch 2 in the report")
    after = report(lab, training)
    (job,) = after["jobs"]
    assert job["status"] == "running" and job["incidents"] == 1
    assert job["unproductive_s"] > 0 and 0 < job["ettr"] < 1
    members = by_name(job["nodes"])
    assert (members["n2"]["role"], members["n3"]["role"]) == ("dead", "active")
    assert members["n3"]["ranks"] == [1] and members["n2"]["ranks"] == []
    accused = by_name(after["nodes"])["n2"]
    assert accused["accusations"] == 1 and f"job {training.job}: " in accused["newest_evidence"]
    assert by_name(after["nodes"])["n1"]["accusations"] == 0

    table = status(lab, training)
    assert table.returncode == 0
    for word in ("NODE", "n2", "standby", "ETTR", str(training.job), "lm", "running"):
        assert word in table.stdout
    one = status(lab, training, str(training.job))
    assert one.returncode == 0 and "node_lost" in one.stdout and "swap_spare" in one.stdout
    detail = report(lab, training, str(training.job))
    assert [i["action"] for i in detail["incidents"]] == ["swap_spare"]

    lab.exec("head", ["scancel", str(training.job)], check=True)
    training.wait_end()

    def settled() -> bool:
        return not report(lab, training)["jobs"]

    # Until then its supervisor may merely be silent: half a minute without a word.
    training.until(settled, "the job is no live one any more", 60)
    (step,) = report(lab, training, str(training.job))["steps"]
    assert step["status"] == "cancelled"
    assert status(lab, training, "424242").returncode == 1


def test_slurm_away(new_lab: LabFactory) -> None:
    """Without slurmctld the files still tell about the job, and the exit code about Slurm."""
    lab = new_lab(nodes=1, standby=0)
    training = start(lab, 1, steps=2000, toy="--step-time 0.1")
    training.wait_step(3)
    conf = (lab.spec.dir / "etc" / "slurm.conf").read_text()
    (lab.shared / "dead.conf").write_text(conf.replace("SlurmctldPort=6817", "SlurmctldPort=6899"))
    training.until(lambda: report(lab, training)["jobs"], "a report")
    argv = ["robust-status", "--json", "--state-dir", str(training.state)]
    dead = {"SLURM_CONF": str(lab.shared / "dead.conf")}
    done = lab.exec("head", argv, env=dead, timeout=60)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert "slurmctld" in found["slurm_error"]
    assert [job["job_id"] for job in found["jobs"]] == [training.job]
    assert [node["name"] for node in found["nodes"]] == ["n1"]


@pytest.mark.parametrize("how", ["cancelled", "requeued"])
def test_a_job_that_is_ended_from_outside_has_lost_no_node(lab: Cluster, how: str) -> None:
    training = start(lab, 2, steps=2000, spares=1, toy="--step-time 0.1", sbatch="--requeue")
    training.wait_step(5)
    number = str(training.job)
    words = ["scancel", number] if how == "cancelled" else ["scontrol", "requeuehold", number]
    lab.exec("head", words, check=True)
    training.until(lambda: not training.processes(), "end of its processes", 40)

    def shown() -> dict[str, Any]:
        (step,) = report(lab, training, number)["steps"]
        return dict(step)

    training.until(lambda: shown()["status"] == how, f"status {how}", 20)
    step = shown()
    assert not {m["name"]: m["role"] for m in step["nodes"] if m["role"] in ("dead", "evicted")}
    assert how in status(lab, training, number).stdout
