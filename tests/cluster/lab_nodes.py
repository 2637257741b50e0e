"""The nodes of a lab as Slurm gives them to a job."""

from __future__ import annotations

import re
import warnings

from waiting import until

from lab import Lab
from lab.slurm.logs import complaints
from lab.slurm.records import parse_state


def hostnames(lab: Lab, nodes: int) -> list[str]:
    done = lab.exec("head", ["srun", f"-N{nodes}", "hostname"], timeout=60, check=True)
    return sorted(done.stdout.split())


def unkillable_by_slurm(log: str) -> bool:
    """True if all steps that outlived SIGKILL, by a slurmd's log, were jobs' extern steps.

    Such a step has one process, a sleep of Slurm's own. Under proctrack/linuxproc no signal reaches
    it while it is still called slurmstepd, between its fork and its exec (docs/lab.md).
    """
    ended = re.findall(r"\*\*\* (.*) STEPD TERMINATED ON ", log)
    return bool(ended) and all(step.startswith("EXTERN STEP FOR ") for step in ended)


def leave_idle(lab: Lab, timeout: float = 45.0) -> None:
    """End the user's jobs, and wait until every node of a lab that tests share is idle.

    A node that Slurm itself drained ("Kill task failed": a step outlived SIGKILL for 60 s) is put
    back into service and fails the test that left it so; the tests after it find all nodes. If no
    step but Slurm's own did, it is only warned of.
    """
    lab.exec("head", ["scancel", "-u", lab.user])
    drained: dict[str, str] = {}

    def idle() -> bool:
        records = lab.node_records()
        for name, record in records.items():
            if "DRAIN" in parse_state(record["State"]):
                drained.setdefault(name, record.get("Reason", "no reason"))
                update = ["scontrol", "update", f"nodename={name}", "state=resume"]
                lab.exec("head", update, user=False)
        return all(parse_state(record["State"]) == {"IDLE"} for record in records.values())

    until(idle, "idle nodes", timeout)
    for name, reason in list(drained.items()):
        log = (lab.spec.dir / "log" / f"slurmd-{name}.log").read_text(errors="replace")
        if reason.startswith("Kill task failed") and unkillable_by_slurm(log):
            warnings.warn(f"Slurm could not end its own extern step on {name}", stacklevel=2)
            del drained[name]
    assert not drained, f"drained, and back in service now: {drained}{complaints(lab.spec)}"
