"""The standby pool of a lab whose slurmctld runs the controller hooks."""

from __future__ import annotations

import os

from pool_lab import Pool
from waiting import until

from bench.controller import install
from health.admin import controller
from lab import Cluster
from lab.spec import ROOT

SOON = 20.0  # s; the timer would come within 5 min
ASLEEP = "#!/bin/sh\nexec sleep 600\n"


def test_the_pool_is_refilled_when_a_standby_node_is_used() -> None:
    name = f"hooked-{os.getpid()}"
    etc = ROOT / name / "robust"
    conf = dict.fromkeys(controller.KEYS, controller.path(str(etc)))
    with Cluster(name=name, nodes=3, standby=0, slurm_conf=conf) as lab:
        pool = Pool(lab, "n2", "n3")
        (pool.state / "jobs").mkdir(mode=0o755)
        install(etc, pool.state, str(ROOT / name / "etc" / "slurm.conf"))
        # Before 23.11 slurmctld looks for the scripts only when it starts.
        lab.daemon("head", "slurmctld", "stop")
        lab.daemon("head", "slurmctld", "start")
        until(lambda: lab.nodes()["n2"] == {"IDLE"} == lab.nodes()["n3"], "idle nodes", SOON)
        pool.run("apply", "--yes", "--nodes", "n[2-3]", "--size", "1", "--from", "train")
        assert pool.partition("standby")["Nodes"] == "n2"
        used = lab.sbatch(ASLEEP, ["-p", "standby", "--exclusive", "-o", "/dev/null"])
        pool.wait_state(used, "RUNNING")
        until(lambda: pool.partition("standby")["Nodes"] == "n[2-3]", "n3 in its place", SOON)
        lab.exec("head", ["scancel", str(used)], check=True)
        until(lambda: pool.partition("standby")["Nodes"] == "n2", "n3 given back", SOON)
