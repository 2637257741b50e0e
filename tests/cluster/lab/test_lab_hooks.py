"""Slurm's scripts in a lab: Prolog, Epilog, HealthCheckProgram, and what slurmd gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from lab import Cluster, host

PROGRAMS = ("Prolog", "Epilog", "HealthCheckProgram")
# Keeps the environment it was started with, and where it runs, in a file per program and node.
SCRIPT = """#!/bin/sh
new={hooks}/new-$$-$SLURMD_NODENAME
tr '\\0' '\\n' < /proc/self/environ > $new
echo "at: $(id -u) $(pwd) $(readlink /proc/self/fd/0) $(umask) $#" >> $new
mv $new {hooks}/ran-{program}-$SLURMD_NODENAME
"""


@pytest.fixture
def lab() -> Iterator[Cluster]:
    name = f"hooks-{os.getpid()}"
    conf: dict[str, str | int] = {
        "HealthCheckInterval": 1,
        "HealthCheckNodeState": "ANY",
        "SchedulerParameters": "nohold_on_prolog_fail,batch_sched_delay=0,sched_interval=1",
    }
    conf |= {program: str(host.ROOT / name / "shared" / program) for program in PROGRAMS}
    with Cluster(name=name, nodes=2, standby=0, gpus=2, slurm_conf=conf) as made:
        for program in PROGRAMS:
            install(made.shared / program, SCRIPT.format(hooks=made.shared, program=program))
        yield made


def install(path: Path, script: str) -> None:
    """At one blow: slurmd may be about to start the old one."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(script)
    fresh.chmod(0o755)
    fresh.rename(path)


def seen(lab: Cluster, program: str, node: str) -> dict[str, str]:
    """The environment in which the program ran last, and "at"."""
    path = lab.shared / f"ran-{program}-{node}"
    until(path.exists, f"{program} on {node}", 20)
    rows = [row.replace("at: ", "at=", 1) for row in path.read_text().splitlines()]
    return dict(row.split("=", 1) for row in rows)


def test_what_slurmd_gives_its_programs(lab: Cluster) -> None:
    argv = ["srun", "-w", "n1", "--gres=gpu:2", "--comment=robust:skip and more", "true"]
    lab.exec("head", argv, check=True)
    at = "0 / /dev/null 0022 0"
    job = {
        "SLURMD_NODENAME": "n1",
        "SLURM_CONF": f"{lab.spec.dir}/etc/slurm.conf",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_UID": str(lab.uid),
        "SLURM_JOB_USER": lab.user,
        "SLURM_JOB_COMMENT": "robust:skip and more",
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_NODELIST": "n1",
        "at": at,
    }
    prolog, epilog = seen(lab, "Prolog", "n1"), seen(lab, "Epilog", "n1")
    assert prolog.items() >= (job | {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}).items()
    after = {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd", "SLURM_JOB_EXIT_CODE2": "0:0"}
    assert epilog.items() >= (job | after).items()
    for environ in (prolog, epilog):
        assert not environ.keys() & {"PATH", "HOME", "USER", "LANG", "TZ"}
    for node in ("n1", "n2"):
        assert seen(lab, "HealthCheckProgram", node) == {"SLURMD_NODENAME": node, "at": at}


def test_a_prolog_may_drain_its_node_with_its_own_reason(lab: Cluster) -> None:
    drain = "scontrol update nodename=$SLURMD_NODENAME state=drain reason=robust:node:x; exit 1"
    install(lab.shared / "Prolog", f"#!/bin/sh\nPATH=/usr/bin:/bin\n{drain}\n")
    job = lab.sbatch("#!/bin/sh\ntrue\n", ["-w", "n2", "--requeue"])
    until(
        lambda: lab.node_records()["n2"].get("Reason", "").startswith("robust:node:x"), "drain", 20
    )
    until(lambda: lab.job(job)["Restarts"] == "1", "requeue", 20)
    assert lab.job(job)["Reason"] == "BeginTime"
    assert lab.nodes()["n1"] == {"IDLE"}
