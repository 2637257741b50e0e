"""A state directory as robust-srun and the node gate write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_system import FakeSystem, context

from health.gate.act import DrainOutcome, drain_event
from health.history import events as gate_history
from robust_slurm.state_dir.ledger import append_line, make_job_dir, replace_file
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import LadderPlan
from standby.size.history import DAY

NOW = 1_800_000_000.0


class Job:
    """Writes one job's files as robust-srun does; times in days before ``now``."""

    def __init__(self, state_dir: Path, number: int, now: float) -> None:
        self.dir = state_dir / "jobs" / str(number)
        self.number = number
        self._now = now
        make_job_dir(state_dir, number)

    def at(self, days: float) -> float:
        return self._now - days * DAY

    def epoch(self, days: float, epoch: int, *nodes: str) -> None:
        self.event(days, "epoch", epoch=epoch, nodes=list(nodes), why="")

    def event(self, days: float, name: str, **fields: Any) -> None:
        append_line(self.dir / "events.jsonl", {"time": self.at(days), "event": name, **fields})

    def lost(self, days: float, *swaps: tuple[str, str], symptom: str = "node_lost") -> None:
        """Nodes that were lost and replaced."""
        failures = [Failure("node_lost", 100.0, 99.0, old) for old, _ in swaps]
        if symptom == "crash":
            failures = [Failure("crash", 100.0, 99.0, swaps[0][0], rank=0, code=1, tail="")]
        it = Incident("0-1", 1, diagnose(failures), 99.0, 100.0)
        it.plan = LadderPlan("swap_standby", tuple(old for old, _ in swaps), "")
        it.swaps += [pair for pair in swaps if pair[1]]
        it.outcome = "recovered"
        it.wall = self.at(days)
        record = {"v": 1, **it.record(self.number, "0")}
        append_line(self.dir / "incidents.jsonl", record)
        self.event(days, "failure", symptom=symptom, evidence=[])

    def roster(self, began: float, until: float, *nodes: str) -> None:
        members = [
            {"name": name, "job_id": self.number, "role": "active", "ranks": [], "silent_s": 0.1}
            for name in nodes
        ]
        record = {
            "version": 1,
            "job_id": self.number,
            "started": self.at(began),
            "updated": self.at(until),
            "nodes": members,
        }
        replace_file(self.dir / "roster.0.json", record)


def drained(
    state_dir: Path, node: str, when: float, job: int = 0, cls: str = "node", check: str = "xid"
) -> None:
    """The node gate's record of a drain, as the gate writes it."""
    system = FakeSystem(context=context("sweep" if not job else "epilog", node, job))
    reason = f"robust:{cls}:{check}:gpu0:reboot:job{job}"
    event = drain_event(system, reason, DrainOutcome(drained=True), "Xid 79")._replace(time=when)
    (state_dir / "nodes").mkdir(exist_ok=True)
    with (state_dir / "nodes" / f"{node}.jsonl").open("ab") as file:
        file.write(gate_history.line(event))


def one_job(state_dir: Path, now: float) -> Job:
    """4 nodes for 10 days; n2 was replaced by n5 after 6: 40 node-days, one loss."""
    job = Job(state_dir, 7, now)
    job.epoch(10, 1, "n1", "n2", "n3", "n4")
    job.lost(4, ("n2", "n5"))
    job.epoch(4, 2, "n1", "n5", "n3", "n4")
    job.roster(10, 0, "n1", "n3", "n4", "n5")
    return job
