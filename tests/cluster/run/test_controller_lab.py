"""The controller hooks, run by a real slurmctld: requeues, the users' directories, the pool."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest
from pool_lab import Pool
from waiting import until

from bench.controller import install, restart
from health.admin import controller
from health.controller.records import USED
from lab import Cluster, host
from lab.spec import UID
from robust_slurm.state_dir.requeue_plan import NAME, RequeuePlan

SOON = 15.0  # s; Slurm's own delay is 121 s
PLAIN = "#!/bin/sh\nexec sleep 600\n"
# As robust-srun does: the directory is its user's, and gets its first record.
ROBUST = """#!/bin/sh
until mkdir -p {jobs}/$SLURM_JOB_ID/{used}; do sleep 0.05; done
exec sleep 600
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A lab with the hooks, in which users cannot write into ``jobs``."""
    name = f"hooked-{os.getpid()}"
    top = host.ROOT / name
    hook = controller.path(str(top / "robust"))
    conf: dict[str, str | int] = dict.fromkeys(controller.KEYS, hook)
    with Cluster(name=name, nodes=3, standby=0, slurm_conf=conf) as lab:
        pool = Pool(lab, "n2", "n3")
        (pool.state / "jobs").mkdir(mode=0o755)
        install(top / "robust", pool.state, str(top / "etc" / "slurm.conf"))
        restart(lab)
        yield pool


def submit(pool: Pool, script: str) -> int:
    job = pool.lab.sbatch(script, ["-n1", "-o", "/dev/null"])
    pool.wait_state(job, "RUNNING")
    return job


def requeue(pool: Pool, *words: str) -> None:
    pool.lab.exec("head", ["scontrol", *words], check=True)


def test_a_requeued_robust_job_starts_at_once(pool: Pool) -> None:
    lab, jobs = pool.lab, pool.state / "jobs"
    script = ROBUST.format(jobs=jobs, used=USED)
    plain, held = submit(pool, PLAIN), submit(pool, script)
    robust, planned = submit(pool, script), submit(pool, script)
    until(lambda: all((jobs / str(j) / USED).is_dir() for j in (held, robust, planned)), "records")
    assert (jobs / str(robust)).stat().st_uid == UID
    plan = json.dumps(RequeuePlan(0, ("n3",)).as_record())
    path = str(jobs / str(planned) / NAME)
    lab.exec("head", ["sh", "-c", 'cat > "$1"', "sh", path], input=plan, check=True)

    requeue(pool, "requeuehold", str(held))
    began = time.time()
    for job in (plain, robust, planned):
        requeue(pool, "requeue", str(job))
    until(lambda: lab.job(robust)["JobState"] == "RUNNING", "its second run", SOON)
    assert time.time() - began < SOON and lab.job(robust)["Restarts"] == "1"
    for job in (plain, planned):
        assert lab.job(job)["JobState"] == "PENDING"
    assert lab.job(held)["Reason"] in ("JobHeldUser", "job_requeued_in_held_state")
    # Now Slurm knows the node that the plan excludes.
    lab.exec("head", ["scontrol", "update", f"JobId={planned}", "ExcNodeList=n3"], check=True)
    until(lambda: lab.job(planned)["JobState"] == "RUNNING", "its second run", SOON)
    assert lab.job(plain)["JobState"] == "PENDING", "no job of ours keeps Slurm's own delay"

    assert (jobs / str(plain)).is_dir()
    everyone = [str(job) for job in (plain, held, robust, planned)]
    lab.exec("head", ["scancel", *everyone], check=True)


def test_a_directory_that_no_record_needed_goes_with_its_job(pool: Pool) -> None:
    jobs = pool.state / "jobs"
    plain = submit(pool, PLAIN)
    until((jobs / str(plain)).is_dir, "its directory", SOON)
    pool.lab.exec("head", ["scancel", str(plain)], check=True)
    until(lambda: not (jobs / str(plain)).exists(), "its end", SOON)


def test_the_pool_is_refilled_when_a_standby_node_is_used(pool: Pool) -> None:
    pool.run("apply", "--yes", "--nodes", "n[2-3]", "--size", "1", "--from", "train")
    assert pool.partition("standby")["Nodes"] == "n2"
    used = pool.lab.sbatch(PLAIN, ["-p", "standby", "--exclusive", "-o", "/dev/null"])
    pool.wait_state(used, "RUNNING")
    until(lambda: pool.partition("standby")["Nodes"] == "n[2-3]", "n3 in its place", SOON)
    pool.lab.exec("head", ["scancel", str(used)], check=True)
    until(lambda: pool.partition("standby")["Nodes"] == "n2", "n3 given back", SOON)
