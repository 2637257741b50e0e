"""Attacks by a process on a GPU: a real process; what NVML says of the GPU is made up."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, VICTIM, Room


def _claims(job: int) -> Any:
    """Return an attack in which a process claims to be of a job of somebody else's."""

    def attack(room: Room) -> Got:
        from health import settings
        from health.checks.gpu import gpu_leftovers
        from health.run.live import LiveSystem, context

        room.site()
        (room.top / "slurmd" / "n1_7.0").touch()  # a step of the victim's job 7 runs here
        code = "import time; print(flush=True); time.sleep(600)"
        with subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            env={"SLURM_JOB_ID": str(job)},
            stdout=subprocess.PIPE,
            user=MALLORY,
            group=MALLORY,
            extra_groups=[],
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            env = {"SLURM_CONF": f"{room.top}/slurm.conf", "SLURMD_NODENAME": "n1"}
            env |= room.job(8, VICTIM) | {"SLURM_JOB_GPUS": "0"}
            system = LiveSystem(settings.defaults((gpu_leftovers.CHECK,)), context("prolog", env))
            used = {"total": 80 << 30, "used": 40 << 30, "free": 40 << 30}
            held: Any = {"index": 0, "pci": "0000:1b:00.0", "uuid": "GPU-0", "name": "H100"}
            held |= {"memory": used, "processes": [{"pid": process.pid, "used": 40 << 30}]}
            system.take_nvml({"stage": "done", "count": 1, "devices": [held]})
            found = [(one.check, one.status) for one in gpu_leftovers.CHECK.run(system)]
            process.kill()
        seen = ("gpu-process-left", "FAIL") in found
        return Got(
            what=f"the gate finds {found or 'nothing'}", succeeded=not seen, silent=not found
        )

    return attack


ATTACKS = [
    Attack(
        name="gpu_claims_running_job",
        row="gate open",
        tries="a process on a job's GPU says in its environment that it is of another running job",
        run=_claims(7),
    ),
    Attack(
        name="gpu_claims_own_job",
        row="gate open",
        tries="a process on a job's GPU says in its environment that it is of this very job",
        run=_claims(8),
    ),
]
