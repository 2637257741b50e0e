"""One request for a standby node: its srun, and what became of it (pure but for the process)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from robust_slurm.slurm import Allotted, Job, Partition, Slurm, SlurmError
from srun_wrapper.command import steps
from srun_wrapper.decide.exclusions import BadNode
from srun_wrapper.requeue.slurm_wait import SlurmWait

MAX_STANDBY_NODES = 64
NO_ANSWER = 4.0  # s; an srun that was refused ends sooner, one without slurmctld later
NOT_LAUNCHED = "JobLaunchFailure"
"""Slurm's reason when nobody took the allocation; now and then also for a task that was killed."""
BUSY = {"None", "Resources", "Priority"}  # Slurm's reasons that only say that nothing is free
A_TASKS = 126  # srun's own exit codes are below; from here on it passes on how a task ended

Outcome = Literal["waiting", "unfit", "again", "refused"]
"""``unfit``: the node did not run robust-task; ``again``: the request never reached a node, and
the next one may; ``refused``: Slurm gives no node."""


class Requester(NamedTuple):
    """The parts from which requests for standby nodes are made."""

    launch: steps.Launch
    secrets: steps.Secrets
    slurm: Slurm
    prefer: Callable[[Sequence[str], Sequence[str]], Mapping[str, str]]
    """Lost nodes, idle nodes -> the idle node that suits best in place of each."""


class Barred(NamedTuple):
    """Nodes that must not become standby nodes of this job."""

    bad: list[str]
    """Nodes that have left this job, less those acquitted; the list is changed in place."""
    earlier: Sequence[BadNode] = ()
    """Nodes with evidence from the job's last steps; they are used where there is no other."""


@dataclass(slots=True)
class StandbyRequest:
    """A request; times are monotonic seconds."""

    number: int
    tasks: int
    argv: list[str]
    prefer: list[str]
    """srun's options that ask for one particular node, at once or not at all."""
    since: float = 0.0  # when its srun was started
    outages: int = 0  # absences of Slurm until then
    process: asyncio.subprocess.Process | None = None
    used: bool = False
    lease: bool = False
    """Made ahead of need; Slurm may take the node back until it is used."""
    hold: asyncio.subprocess.Process | None = None
    """The srun that keeps the node of a lease that is used."""
    outcome: Outcome = "waiting"
    job: int = 0  # the standby allocation
    node: str = ""  # the node that Slurm allotted
    runs_since: float | None = None  # when its step was first seen to run there

    @property
    def ended(self) -> bool:
        """True if its srun has ended, and none follows."""
        return self.process is not None and self.process.returncode is not None and not self.prefer

    def silent(self, now: float, limit: float) -> bool:
        """True if robust-task should have reported by now; the caller knows that it did not."""
        return self.runs_since is not None and now - self.runs_since >= limit

    def update(self, jobs: Sequence[Allotted], now: float) -> Allotted | None:
        """Take over what Slurm knows of the request; returns its job."""
        session = self.process.pid if self.process is not None else 0  # srun leads its session
        own = [job for job in jobs if job.session == session]
        if not own:
            return None
        job = own[-1]
        self.job = job.id
        self.node = job.nodes[0] if job.nodes else ""
        if job.state == "RUNNING" and self.node and self.runs_since is None:
            self.runs_since = now
        return job

    def terminate(self) -> None:
        _terminate(self.process)

    def let_go(self) -> None:
        """End the srun that keeps the node of a lease."""
        _terminate(self.hold)


def _terminate(process: asyncio.subprocess.Process | None) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


def unmatched(wanted: Sequence[tuple[int, str]], have: Sequence[int]) -> list[tuple[int, str]]:
    """Return those of (ranks, name) for which no request is left; ``have``: ranks of each."""
    spare, missing = sorted(have), []
    for tasks, name in sorted(wanted, reverse=True):
        fitting = next((one for one in spare if one >= tasks), None)
        if fitting is None:
            missing.append((tasks, name))
        else:
            spare.remove(fitting)
    return missing


def outcome(job: Allotted | None, code: int, lasted: float, away: bool) -> Outcome:
    """Judge a request whose srun has ended before robust-task reported.

    ``code``: srun's exit code. ``lasted``: seconds that it ran. ``away``: Slurm was away meanwhile,
    so that the end of srun says nothing about a node. Slurm cancels an allocation whose prolog
    fails.
    """
    if away:
        return "again"
    if job is None:
        return "again" if lasted >= NO_ANSWER else "refused"
    if not job.nodes:
        return "refused"
    if job.state in ("CANCELLED", "PREEMPTED") or (job.reason == NOT_LAUNCHED and code < A_TASKS):
        return "again"
    return "unfit"


def standby_minutes(job: Job, partition: Partition, now: float) -> int:
    """Time limit of a standby allocation: what is left of the job's, at most the partition's."""
    left = job.end_time - now if job.end_time else 365 * 86400.0
    most = partition.max_time_s if partition.max_time_s else left
    return max(1, math.ceil(min(left, most) / 60))


async def held_up(wait: SlurmWait, slurm: Slurm, name: str, over: Callable[[], bool]) -> str:
    """Return why Slurm grants our jobs of that name no node; "" if Slurm was away."""
    before = wait.outage.count
    try:
        reasons = await wait.call("get a standby node", lambda: slurm.waiting_reasons(name), over)
    except SlurmError:
        return "Slurm gives no reason"
    if wait.outage.count != before:
        return ""
    told = "; ".join(sorted(reasons - BUSY))
    return f"Slurm's reason: {told}" if told else "none became free"
