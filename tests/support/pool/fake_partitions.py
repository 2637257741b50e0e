"""Slurm's commands for tests of the pool: partitions that can be changed, nodes, jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from robust_slurm.slurm import Completed, Slurm
from robust_slurm.slurm.values import expand, fold

DEFAULTS = {"PriorityTier": "1", "PreemptMode": "OFF", "QoS": "N/A", "State": "UP"}


class FakeJob(NamedTuple):
    partition: str
    nodes: str = ""
    state: str = "RUNNING"
    user: str = "ada"
    comment: str = "(null)"


class FakePartitions:
    """A runner for the door. ``orders`` are the words of each change that was asked for."""

    def __init__(self, **partitions: str) -> None:
        self.partitions = {name: {"Nodes": nodes, **DEFAULTS} for name, nodes in partitions.items()}
        names = dict.fromkeys(node for nodes in partitions.values() for node in expand(nodes))
        self.nodes = dict.fromkeys(names, ("IDLE", ""))
        self.jobs: dict[int, FakeJob] = {}
        self.config = {
            "AccountingStorageType": "accounting_storage/none",
            "HealthCheckInterval": "300 sec",
            "HealthCheckProgram": "/etc/robust-slurm/healthcheck",
            "PreemptMode": "OFF",
            "PreemptType": "preempt/none",
        }
        self.down = self.denied = False
        self.lost = ""  # what is said in place of the answer to an order that is carried out
        self.orders: list[str] = []

    def door(self) -> Slurm:
        return Slurm(self, environ={"PATH": "/usr/bin"})

    def preempt(self) -> None:
        self.config |= {"PreemptMode": "REQUEUE", "PreemptType": "preempt/partition_prio"}

    def nodes_of(self, partition: str) -> str:
        return self.partitions[partition]["Nodes"]

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        words = [word for word in argv[1:] if word not in ("-a", "-o", "-h")]
        if words == ["ping"]:
            return _said(f"Slurmctld(primary) at head is {'DOWN' if self.down else 'UP'}")
        if words == ["version"]:
            return _said("slurm 22.05.8")
        if self.down:
            return Completed(1, "", "slurm_load: Unable to contact slurm controller")
        if argv[0] == "squeue":
            return self._squeue(argv[-1])
        if words[0] == "show":
            return self._show(words[1], words[2:])
        return self._order(words)

    def _squeue(self, columns: str) -> Completed:
        lines = []
        for number, job in self.jobs.items():
            row = {"%A": str(number), "%T": job.state, "%P": job.partition, "%u": job.user}
            row |= {"%N": job.nodes, "%U": "7"}
            lines.append("|".join(row[column] for column in columns.split("|")))
        return _said("\n".join(lines))

    def _show(self, what: str, which: Sequence[str]) -> Completed:
        if what == "config":
            return _said("\n".join(f"{key} = {value}" for key, value in self.config.items()))
        if what == "partition":
            rows = {f"PartitionName={n}": p for n, p in self.partitions.items()}
            return _said("\n".join(f"{head} {_pairs(row)}" for head, row in rows.items()))
        if what == "node":
            return _said("\n".join(self._node(name) for name in self.nodes))
        found = {n: job for n, job in self.jobs.items() if not which or which == [str(n)]}
        return _said("\n".join(_job(number, job) for number, job in found.items()))

    def _node(self, name: str) -> str:
        state, reason = self.nodes[name]
        inside = [p for p, row in self.partitions.items() if name in expand(row["Nodes"])]
        text = f"NodeName={name} State={state} Partitions={','.join(inside)}"
        return f"{text} Reason={reason} [root@1800000000]" if reason else text

    def _order(self, words: Sequence[str]) -> Completed:
        action, (_, name), given = words[0], words[1].split("="), words[2:]
        self.orders.append(" ".join([action, name, *given]))
        if self.denied:
            return Completed(1, "", "slurm_update error: Invalid user id")
        row = self.partitions.setdefault(name, {"Nodes": "", **DEFAULTS})
        settings = dict(word.split("=", 1) for word in given)
        wanted = expand(settings.pop("Nodes", row["Nodes"]))
        row |= settings
        if not set(wanted) <= set(self.nodes):  # refused, and yet no node can be used from now on
            row["TotalNodes"] = "0"
            return Completed(1, "", "slurm_update error: Invalid node name specified")
        row |= {"Nodes": fold(wanted), "TotalNodes": str(len(wanted))}
        return Completed(1, "", self.lost) if self.lost else _said("")


def _said(text: str) -> Completed:
    return Completed(0, text + "\n", "")


def _pairs(row: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value or '(null)'}" for key, value in row.items())


def _job(number: int, job: FakeJob) -> str:
    return (
        f"JobId={number} JobName=x UserId={job.user}(7) GroupId=g(7) MCS_label=N/A "
        f"JobState={job.state} Partition={job.partition} NodeList={job.nodes or '(null)'} "
        f"Comment={job.comment}"
    )
