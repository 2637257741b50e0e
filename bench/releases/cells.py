"""The cells of the matrix: each proves one thing on a lab of one release, and takes its time.

A cell is a function of the lab. It returns seconds, raises ``Missing`` where what it would prove
does not exist or cannot run here, and any other error where it went wrong.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping

from bench.chaos.site import write_site
from bench.common import BenchError
from bench.recovery.cases import recovered, robust_job
from bench.releases import contract, plugin
from bench.releases.container import killed_in_image, why_not
from bench.training.job import POLL, Training
from health.admin.install import InstallError
from lab import Cluster, Lab
from lab.spec import HEAD

SOON_S = 60.0
WIDE = "max_nodes = 100\nmax_percent = 100.0\nmax_per_job = 100\nhold_down = 0\nhold_times = 0\n"
GATED = "n4"  # the node that the gate drains; the trainings run on n1 to n3 and s1
NODES = 5


class Missing(Exception):
    """The reason why there is no time: nothing went wrong."""


@contextlib.contextmanager
def site(release: str) -> Iterator[Lab]:
    """Bring up a lab of a release with the gate installed."""
    named = Cluster().spec
    etc = named.dir / "site"
    conf = {
        "Prolog": f"{etc}/prolog",
        "Epilog": f"{etc}/epilog",
        "HealthCheckProgram": f"{etc}/healthcheck",
        "HealthCheckInterval": "3600",  # the cell runs it when it wants it
        "PrologFlags": "Alloc,Contain,DeferBatch",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
        "bf_interval=1,nohold_on_prolog_fail",
    }
    with Cluster(name=named.name, nodes=NODES, standby=1, slurm_conf=conf, slurm=release) as lab:
        state = lab.spec.dir / "site" / "state"
        settings = f'state_dir = "{state}"\n[gate]\nspool = "{lab.disk}/gate"\n[breaker]\n{WIDE}'
        write_site(etc, settings, ("prolog", "epilog", "healthcheck"))
        state.mkdir(mode=0o755)
        (state / "jobs").mkdir()
        (state / "jobs").chmod(0o1777)
        yield lab


# ---- a node crashes under a training


@contextlib.contextmanager
def _training(lab: Lab, spares: int, options: str = "") -> Iterator[Training]:
    """A training on n1, n2 (and spares), which may lose n2."""
    where = f"n[1-{2 + spares}]"  # but for the requeue, of which n2 is no part
    training = robust_job(lab, "toy", 2, 1, where, spares, f"--robust-no-warm {options}")
    try:
        training.wait_stepping()
        yield training
    finally:
        training.scancel()
        if lab.faults()["n2"] != "up":
            lab.heal("n2")
        training.cancel()


def _swap(lab: Lab, action: str, spares: int) -> float:
    with _training(lab, spares) as training:
        return recovered(training, lambda: lab.crash("n2"), action)["total"]


def swap_spare(lab: Lab) -> float:
    """A spare node of the allocation takes the ranks of a node that crashes."""
    return _swap(lab, "swap_spare", 1)


def swap_standby(lab: Lab) -> float:
    """A node of the standby partition does."""
    return _swap(lab, "swap_standby", 0)


def requeue(lab: Lab) -> float:
    """The job runs again elsewhere: from the crash to the first step of all ranks."""
    with _training(lab, 0, "--robust-standby-partition=") as training:
        at = lab.crash("n2")
        back = lambda: len(training.first_steps(at)) == training.world  # noqa: E731
        training.wait(back, "no run after the requeue", 3 * SOON_S)
        found = [incident.action for incident in training.incidents()]
        if found != ["requeue"]:
            raise BenchError(f"{training.directory}: {found} where a requeue was expected")
        return max(training.first_steps(at).values()) - at


# ---- the gate


def gate_drain(lab: Lab) -> float:
    """The prolog drains a node with a full disk: from sbatch until the job is queued again."""
    lab.fill(GATED, "/tmp")
    began = time.monotonic()
    job = lab.sbatch("#!/bin/sh\n", ["-w", GATED, "-o", "/dev/null"])

    def refused() -> bool:
        record = lab.job(job)
        return record["JobState"] == "PENDING" and record["Restarts"] != "0"

    _until(refused, f"job {job} was not requeued by the gate")
    took = time.monotonic() - began
    reason = lab.node_records()[GATED].get("Reason", "")
    lab.exec(HEAD, ["scancel", str(job)], check=True)
    if not reason.startswith("robust:node:disk-full:/tmp:"):
        raise BenchError(f"{GATED} was not drained by the gate: reason {reason!r}")
    _return_to_service(lab)
    return took


def sweep_undrain(lab: Lab) -> float:
    """The sweep returns a node to service: one run of the HealthCheckProgram, until it is IDLE."""
    lab.fill(GATED, "/tmp")
    _sweep(lab)
    if "DRAIN" not in lab.nodes()[GATED]:
        raise BenchError(f"{GATED} has a full disk, and the sweep did not drain it")
    return _return_to_service(lab)


def _return_to_service(lab: Lab) -> float:
    """Repair the node and have the sweep undrain it; return the seconds from the sweep on."""
    lab.heal(GATED)
    began = time.monotonic()
    _sweep(lab)
    _until(lambda: lab.nodes()[GATED] == {"IDLE"}, f"{GATED} was not undrained")
    return time.monotonic() - began


def _sweep(lab: Lab) -> None:
    stub = str(lab.spec.dir / "site" / "healthcheck")
    argv = ["env", "-i", f"SLURMD_NODENAME={GATED}", stub]
    lab.exec(GATED, argv, user=False, cwd="/", timeout=90, check=True)


# ---- the others


def status(lab: Lab) -> float:
    """robust-status sees a running training: its job, its nodes, no error of Slurm's."""
    with _training(lab, 0) as training:
        argv = ["robust-status", "--state-dir", str(training.directory / "state"), "--json"]
        began = time.monotonic()
        done = lab.exec(HEAD, argv, check=True)
        took = time.monotonic() - began
        found = json.loads(done.stdout)
        jobs = [job["job_id"] for job in found["jobs"] if job["status"] == "running"]
        nodes = [node["name"] for node in found["nodes"]]
        if found["slurm_error"] or jobs != [training.job] or nodes != lab.spec.compute_names:
            raise BenchError(f"robust-status: {done.stdout[:1000]}")
        return took


def plugin_flag(lab: Lab) -> float:
    """``sbatch --robust`` by the SPANK plugin, built for the lab's release: a rank is killed."""
    try:
        return plugin.killed_under_srun(lab.spec.slurm)
    except InstallError as error:
        raise Missing(f"{error}") from error


def pyslurm_contract(lab: Lab) -> float:
    """The contract tests of the client, by pyslurm."""
    if why := contract.why_not(lab.spec.slurm):
        raise Missing(why)
    return contract.contract()


def container(lab: Lab) -> float:
    """A training inside a container image, with the image's own Python: a rank is killed."""
    if why := why_not(lab):
        raise Missing(why)
    return killed_in_image(lab)


CELLS: Mapping[str, Callable[[Lab], float]] = {
    "swap_spare": swap_spare,
    "swap_standby": swap_standby,
    "requeue": requeue,
    "gate_drain": gate_drain,
    "sweep_undrain": sweep_undrain,
    "status": status,
    "plugin_flag": plugin_flag,
    "pyslurm_contract": pyslurm_contract,
    "container": container,
}


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not ready():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} within {SOON_S:g} s")
        time.sleep(10 * POLL)
