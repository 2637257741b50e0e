"""The nodes of a lab as Slurm gives them to a job."""

from __future__ import annotations

from waiting import until

from lab import Lab
from lab.slurm.logs import complaints
from lab.slurm.records import parse_state


def hostnames(lab: Lab, nodes: int) -> list[str]:
    done = lab.exec("head", ["srun", f"-N{nodes}", "hostname"], timeout=60, check=True)
    return sorted(done.stdout.split())


def leave_idle(lab: Lab, timeout: float = 45.0) -> None:
    """End the user's jobs, and wait until every node of a lab that tests share is idle.

    A node that Slurm itself drained ("Kill task failed": a step outlived SIGKILL for 60 s) is put
    back into service and fails the test that left it so; the tests after it find all nodes.
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
    assert not drained, f"drained, and back in service now: {drained}{complaints(lab.spec)}"
