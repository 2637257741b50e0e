"""Slurm's jobs, nodes and partitions, as immutable typed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from robust_slurm.slurm import parse, values

# A job in one of these will not run again by itself (a requeue is possible from most of them).
FINISHED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)

# Flags that keep Slurm from placing work on a node.
_UNUSABLE = frozenset(
    {
        "BLOCKED",
        "DOWN",
        "DRAIN",
        "ERROR",
        "FAIL",
        "FUTURE",
        "INVALID_REG",
        "MAINTENANCE",
        "NOT_RESPONDING",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWER_DOWN",
        "REBOOT_ISSUED",
        "UNKNOWN",
    }
)

# Flags that come with a reason. From 24.11 on, without slurmdbd, a reason outlives its flag: the
# node keeps it, with its time, until Slurm gives the node to the next job.
_NEED_REASON = frozenset(
    {"DOWN", "DRAIN", "ERROR", "FAIL", "FUTURE", "MAINTENANCE", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
)


@dataclass(frozen=True)
class Step:
    """A running step. ``host`` and ``pid``: of the srun that started it, as that host sees it."""

    id: str
    nodes: tuple[str, ...]
    host: str
    pid: int


@dataclass(frozen=True)
class Job:
    """One job (or one array task, or one component of a heterogeneous job). Times in seconds."""

    id: int
    array_job_id: int | None
    array_task_id: str | None  # "7", or "3-5%2" for the tasks that have not been split off yet
    name: str
    user: str
    uid: int
    state: str  # the base state, e.g. "RUNNING"
    flags: frozenset[str]  # what newer releases print behind it, e.g. {"COMPLETING"}
    reason: str | None
    partition: str
    nodes: tuple[str, ...]
    batch_host: str | None
    num_nodes: int
    requeue: bool
    restarts: int
    batch: bool
    time_limit_s: int | None  # None: unlimited, or the partition's
    start_time: float | None
    end_time: float | None  # for a running job: when its time limit ends it
    account: str | None
    qos: str | None
    reservation: str | None
    exclude: tuple[str, ...]
    features: str | None
    tres_per_node: str | None  # as --gres takes it, e.g. "gpu:h100:4"
    min_memory_node_mb: int | None
    min_memory_cpu_mb: int | None
    cpus_per_task: int
    oversubscribe: str
    work_dir: str | None
    command: str | None
    comment: str | None
    raw: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def running(self) -> bool:
        """True if the job runs; in the state SIGNALING it does, and Slurm is sending a signal."""
        return self.state in ("RUNNING", "SIGNALING")

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


@dataclass(frozen=True)
class SlurmNode:
    """One node. ``state`` is a set of flags such as {"IDLE", "DRAIN"}."""

    name: str
    hostname: str
    port: int | None
    state: frozenset[str]
    reason: str | None
    reason_time: float | None
    partitions: tuple[str, ...]
    gres: str | None
    cpus: int
    comment: str | None
    raw: Mapping[str, str] = field(repr=False, compare=False)  # empty by pyslurm
    features: tuple[str, ...] = ()  # that a job can ask for

    @property
    def usable(self) -> bool:
        """True if Slurm would place work here (a busy node is usable)."""
        return not self.state & _UNUSABLE

    @property
    def idle(self) -> bool:
        """True if the node could take a whole-node job now."""
        return self.usable and "IDLE" in self.state and "COMPLETING" not in self.state

    @property
    def reason_in_force(self) -> str:
        """The reason for the node's present state; "" if it is left over from an earlier state."""
        return (self.reason or "") if self.state & _NEED_REASON else ""


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    nodes: tuple[str, ...]
    state: str
    default: bool
    max_time_s: int | None  # None: no limit
    oversubscribe: str
    raw: Mapping[str, str] = field(repr=False, compare=False)


@dataclass(frozen=True)
class JobPlacement:
    """A job that holds nodes: its state, the partition it runs in, its user, and which nodes."""

    state: str
    partition: str
    user: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Allotted:
    """A job of our own user that asked for nodes: how far it is, and which nodes it got."""

    id: int
    session: int  # session id of the process that asked, on its own host
    state: str
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class StandbyClaim:
    """A job of any user that holds, or waits for, a standby node for the training job ``of``."""

    id: int
    of: int
    state: str
    user: str
    nodes: tuple[str, ...]


def job_from(record: Mapping[str, str]) -> Job:
    """Return the job. Raises ParseError when a field that every release prints is missing."""
    user = re.fullmatch(r"([^()]*)\((\d+)\)", record.get("UserId", ""))
    if user is None:
        raise values.ParseError(f"job record without an owner: JobId={record.get('JobId')}")
    state, *flags = re.split(r"[+,]", _required(record, "JobState"))
    return Job(
        id=_number(record, "JobId"),
        array_job_id=values.integer(record.get("ArrayJobId")) or None,
        array_task_id=values.optional(record.get("ArrayTaskId")),
        name=record.get("JobName", ""),
        user=user[1],
        uid=int(user[2]),
        state=state,
        flags=frozenset(flags),
        reason=values.optional(record.get("Reason")),
        partition=record.get("Partition", ""),
        nodes=values.expand(record.get("NodeList")),
        batch_host=values.optional(record.get("BatchHost")),
        num_nodes=values.integer(record.get("NumNodes")),
        requeue=record.get("Requeue") == "1",
        restarts=values.integer(record.get("Restarts")),
        batch=record.get("BatchFlag", "0") != "0",  # 2 after a batch job was requeued
        time_limit_s=values.duration_s(record.get("TimeLimit")),
        start_time=values.epoch(record.get("StartTime")),
        end_time=values.epoch(record.get("EndTime")),
        account=values.optional(record.get("Account")),
        qos=values.optional(record.get("QOS")),
        reservation=values.optional(record.get("Reservation")),
        exclude=values.expand(record.get("ExcNodeList")),
        features=values.optional(record.get("Features")),
        tres_per_node=values.gres_option(record.get("TresPerNode")),
        min_memory_node_mb=values.megabytes(record.get("MinMemoryNode")),
        min_memory_cpu_mb=values.megabytes(record.get("MinMemoryCPU")),
        cpus_per_task=values.integer(record.get("CPUs/Task"), 1),
        oversubscribe=record.get("OverSubscribe", ""),
        work_dir=values.optional(record.get("WorkDir")),
        command=values.optional(record.get("Command")),
        comment=values.optional(record.get("Comment")),
        raw=record,
    )


def node_from(record: Mapping[str, str]) -> SlurmNode:
    """Return the node. Raises ParseError when name or state is missing."""
    name = _required(record, "NodeName")
    features = values.optional(record.get("AvailableFeatures"))
    return SlurmNode(
        name=name,
        hostname=record.get("NodeHostName", name),
        port=values.integer(record.get("Port")) or None,
        state=values.state_flags(_required(record, "State")),
        reason=values.optional(record.get("Reason")),
        reason_time=values.epoch(record.get(parse.REASON_TIME)),
        partitions=tuple(p for p in record.get("Partitions", "").split(",") if p),
        gres=values.optional(record.get("Gres")),
        cpus=values.integer(record.get("CPUTot")),
        comment=values.optional(record.get("Comment")),
        raw=record,
        features=tuple(features.split(",")) if features else (),
    )


def partition_from(record: Mapping[str, str]) -> Partition:
    """Return the partition. Raises ParseError when the name is missing."""
    return Partition(
        name=_required(record, "PartitionName"),
        nodes=values.expand(record.get("Nodes")),
        state=record.get("State", "UNKNOWN"),
        default=record.get("Default") == "YES",
        max_time_s=values.duration_s(record.get("MaxTime")),
        oversubscribe=record.get("OverSubscribe", ""),
        raw=record,
    )


def job_id_for_cli(job: Job) -> str:
    """The id as Slurm's commands take it: "123", or "120_4" for an array task.

    The array form names one task only; the array's own number would mean all of its tasks.
    """
    if job.array_job_id is not None and (job.array_task_id or "").isdecimal():
        return f"{job.array_job_id}_{job.array_task_id}"
    return str(job.id)


def _required(record: Mapping[str, str], key: str) -> str:
    value = record.get(key, "")
    if not value:
        raise values.ParseError(f"record without {key}: {dict(list(record.items())[:3])}")
    return value


def _number(record: Mapping[str, str], key: str) -> int:
    value = _required(record, key)
    if not value.isascii() or not value.isdigit():
        raise values.ParseError(f"{key} is not a number: {value[:40]!r}")
    return int(value)
