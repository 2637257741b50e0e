"""Cases whose cause many nodes share: file systems, the network, pauses, Slurm's own daemons."""

from __future__ import annotations

import os
import signal
import time

from bench.chaos.case import Case, Fault
from bench.chaos.job import Job
from bench.chaos.stalls import EVERYBODY, STALLS
from bench.chaos.verdict import Expected
from lab.verbs.disruption import expand

N2 = frozenset({"n2"})
CRASHED = Expected(bad=N2, found=N2)


def outage(nodes: str, seconds: float) -> Fault:
    """Return an outage of the links of `nodes` (0: for good)."""

    def fault(job: Job) -> None:
        job.lab.outage(nodes, seconds)

    return fault


def pause(nodes: str, seconds: float) -> Fault:
    """Return a pause of `nodes`, as of virtual machines."""

    def fault(job: Job) -> None:
        job.lab.pause(nodes, seconds)

    return fault


def suspend(job: Job) -> None:
    """Suspend the job by Slurm for 15 s."""
    job.scontrol("suspend", str(job.id))
    time.sleep(15)
    job.scontrol("resume", str(job.id))


def pause_supervisor(job: Job) -> None:
    """Stop the supervisor's process for 12 s."""
    pid = job.supervisor()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(12)
    os.kill(pid, signal.SIGCONT)


def away(name: str, broken: str, mended: str, seconds: float = 35.0) -> Fault:
    """Return a crash of n2 while a daemon of the head is broken for so many seconds."""

    def fault(job: Job) -> None:
        job.lab.daemon("head", name, broken)
        job.lab.crash("n2")
        time.sleep(seconds)
        job.lab.daemon("head", name, mended)

    return fault


def slow(delay_ms: float, loss_percent: float) -> Fault:
    """Return a bad link of n2 and n3 for 10 s."""

    def fault(job: Job) -> None:
        for node in ("n2", "n3"):
            job.lab.slow(node, delay_ms=delay_ms, loss_percent=loss_percent)
        time.sleep(10)
        for node in ("n2", "n3"):
            job.lab.ask("heal", node=node)

    return fault


def slurmd(action: str) -> Fault:
    """Return a fault of the slurmd of n2 for the rest of the job."""

    def fault(job: Job) -> None:
        job.lab.daemon("n2", "slurmd", action)

    return fault


def _outages() -> list[Case]:
    found = []
    for seconds in (1, 3, 10):
        # 10 s is as long as robust-srun waits by default (outage_wait): nodes may be replaced then.
        late = seconds == 10
        found += [
            Case(
                name=f"outage_others_{seconds}s",
                broken=f"all nodes but the batch host are cut off for {seconds} s",
                fault=outage("n[2-4]", seconds),
                nodes=4,
                expected=Expected(gone=frozenset(expand("n[1-4]") if late else ())),
            ),
            Case(
                name=f"outage_half_{seconds}s",
                broken=f"three nodes of six are cut off for {seconds} s",
                fault=outage("n[4-6]", seconds),
                nodes=6,
                expected=Expected(gone=frozenset(expand("n[4-6]") if late else ())),
            ),
        ]
    found += [
        Case(
            name="outage_both_others_3s",
            broken="both nodes but the batch host, of three, are cut off for 3 s",
            fault=outage("n[2-3]", 3),
        ),
        Case(
            name="switch_dead",
            broken="three nodes of six are cut off for good; three spares are left",
            fault=outage("n[4-6]", 0),
            nodes=6,
            spares=3,
            expected=Expected(gone=frozenset(expand("n[4-6]"))),
        ),
        Case(
            name="batch_host_cut_2s",
            broken="the batch host is cut off for 2 s",
            fault=outage("n1", 2),
            nodes=4,
        ),
        Case(  # longer than robust-srun waits (outage_wait), not as long as the agents do
            name="batch_host_cut_14s",
            broken="the batch host is cut off for 14 s",
            fault=outage("n1", 14),
            nodes=4,
            expected=Expected(gone=frozenset(expand("n[1-4]"))),
            limit=120.0,
            epilog=True,
        ),
    ]
    return found


SHARED = [
    *STALLS,
    *_outages(),
    *(
        Case(
            name=f"{name.lower()}_everywhere",
            broken=f"the file system of the training data answers {name} once, on all ranks",
            program=f"--error {name} --error-at 40 --error-once",
            met=text,
        )
        for name, text in (("ESTALE", "Stale file handle"), ("EROFS", "Read-only file system"))
    ),
    Case(
        name="net_delay",
        broken="400 ms of delay in each direction to two nodes of three, for 10 s",
        fault=slow(400, 0),
    ),
    Case(
        name="net_loss",
        broken="15 % of packets are lost in each direction to two nodes of three, for 10 s",
        fault=slow(0, 15),
    ),
    Case(name="suspend", broken="Slurm suspends the job for 15 s", fault=suspend),
    Case(
        name="pause_all",
        broken="all nodes of the job pause for 8 s, as virtual machines do",
        fault=pause(EVERYBODY, 8),
    ),
    Case(
        name="pause_batch_host",
        broken="the batch host pauses for 8 s",
        fault=pause("n1", 8),
    ),
    Case(
        name="pause_node",
        broken="one node pauses for 8 s: it may be replaced, but it is healthy again",
        fault=pause("n2", 8),
        expected=Expected(gone=N2),
        steps=400,  # the job goes on when the node is back
        epilog=True,
    ),
    Case(
        name="pause_supervisor",
        broken="robust-srun is stopped for 12 s",
        fault=pause_supervisor,
    ),
    Case(
        name="slurmctld_stopped",
        broken="slurmctld is away for 35 s when a node crashes",
        fault=away("slurmctld", "stop", "start"),
        expected=CRASHED,
        limit=120.0,
    ),
    Case(
        name="slurmctld_frozen",
        broken="slurmctld does not answer for 35 s when a node crashes",
        fault=away("slurmctld", "freeze", "thaw"),
        expected=CRASHED,
        limit=120.0,
    ),
    Case(
        name="munge_away",
        broken="munged is away for 35 s when a node crashes",
        fault=away("munged", "stop", "start"),
        expected=CRASHED,
        limit=120.0,
    ),
    Case(
        name="slurmd_stopped",
        broken="slurmd of a node is stopped while its ranks train",
        fault=slurmd("stop"),
    ),
    Case(
        name="slurmd_frozen",
        broken="slurmd of a node stands still while its ranks train",
        fault=slurmd("freeze"),
    ),
]
