"""Cases of one node or program: standby nodes, our own processes, users, true faults."""

from __future__ import annotations

import os
import signal
import sys
import time

from bench.chaos.case import Case, Fault
from bench.chaos.job import Job
from bench.chaos.verdict import CANCELLED, COMPLETED, FAILED, TIMEOUT, Expected

N1, N2 = frozenset({"n1"}), frozenset({"n2"})
CRASHED = Expected(bad=N2, found=N2)
BAD_STANDBY = Expected(bad=frozenset({"n2", "s1"}), found=frozenset({"n2", "s1"}))
ENDED = Expected(ends=(FAILED,))
S1_ENDED = r"srun: error: s1: task 0: (Exited with exit code 127|Killed)"
STRANGERS = 150  # connections
STRANGER = """
import socket, sys, time
held = []
for port in sys.argv[2:]:
    for _ in range({count}):
        try:
            held.append(socket.create_connection((sys.argv[1], int(port)), timeout=1))
        except OSError:
            pass
print(len(held), flush=True)
time.sleep(6)
"""


def crash(job: Job) -> None:
    """Crash n2."""
    job.lab.crash("n2")


def on_rank(number: signal.Signals) -> Fault:
    """Return a signal to rank 1."""

    def fault(job: Job) -> None:
        job.signal_rank(1, number)

    return fault


def standby_python(text: str) -> Fault:
    """Return the replacement of s1's Python by a shell script."""

    def before(job: Job) -> None:
        script = job.dir / "no-python"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        python = os.path.realpath(sys.executable)  # robust-task's
        bind = ["mount", "--bind", str(script), python]
        job.lab.exec("s1", bind, user=False, check=True)

    return before


def fill_standby(job: Job) -> None:
    """Fill /dev/shm of s1."""
    job.lab.fill("s1", "/dev/shm")


def no_standby(job: Job) -> None:
    """Drain the standby nodes: a node that is lost waits for its replacement."""
    job.scontrol("update", "nodename=s1,s2", "state=drain", "reason=chaos")


def kill_shim(which: int) -> Fault:
    """Return a SIGKILL to a shim of n2 (0: the agent)."""

    def fault(job: Job) -> None:
        os.kill(job.shims("n2")[which], signal.SIGKILL)

    return fault


def kill_guardian(job: Job) -> None:
    """Kill the guardian of n2's shim: for Slurm its task is dead."""
    os.kill(job.guardians("n2")[0], signal.SIGKILL)


def hang_own_agent(job: Job) -> None:
    """Stop the agent of the batch host, on which robust-srun runs."""
    os.kill(job.shims("n1")[0], signal.SIGSTOP)


def dead_mount(job: Job) -> None:
    """Let the scratch of n2 answer nothing any more."""
    job.lab.stall("n2")


def kill_supervisor(job: Job) -> None:
    """Kill robust-srun, and nothing else."""
    os.kill(job.supervisor(), signal.SIGKILL)


def strangers(job: Job) -> None:
    """Give the shims of n2 few descriptors, and connect to every port of n2 and n1 from n5."""
    few = (
        "for pid in $(pgrep -f srun_wrapper.agent.task); do prlimit --pid $pid --nofile=64:64; done"
    )
    job.lab.exec("n2", ["bash", "-c", few], check=True)
    for node in ("n1", "n2"):
        listening = job.lab.exec(node, ["ss", "-Hltn"], check=True).stdout.splitlines()
        ports = {line.split()[3].rpartition(":")[2] for line in listening} - {"6818"}
        code = STRANGER.format(count=STRANGERS)
        job.lab.exec("n5", ["python", "-c", code, node, *sorted(ports)], check=True)


def scancel(job: Job) -> None:
    """Cancel the job."""
    job.lab.exec("head", ["scancel", str(job.id)], check=True)


def scancel_in_recovery(job: Job) -> None:
    """Crash n2, and cancel the job while it waits for a node."""
    job.lab.crash("n2")
    time.sleep(4)
    scancel(job)


def scancel_silent(job: Job) -> None:
    """Stop all of n2, and cancel the job."""
    job.lab.hang("n2")
    scancel(job)


def time_limit(job: Job) -> None:
    """Let the job's time end while it waits for a node."""
    job.scontrol("update", f"jobid={job.id}", "TimeLimit=1")
    job.lab.crash("n2")


def truncate(job: Job) -> None:
    """Cut the file short that all ranks have mapped, twice."""
    for _ in range(2):
        data = job.dir / "data"
        data.write_bytes(b"x" * 8192)
        job.wait_steps(10)
        os.truncate(data, 4096)
        time.sleep(2)


def hang_node(job: Job) -> None:
    """Stop all of n2."""
    job.lab.hang("n2")


STANDBY = [
    Case(
        name=name,
        broken=f"a node crashes; the first standby node {what}",
        before=before,
        fault=crash,
        expected=CRASHED if name == "standby_shm_full" else BAD_STANDBY,  # it has /tmp
        met=met,
        limit=120.0,
    )
    for name, what, before, met in (
        ("standby_no_python", "has no Python", standby_python("exit 127"), S1_ENDED),
        (
            "standby_dies",
            "dies before it reports",
            standby_python("sleep 1; kill -9 $$"),
            S1_ENDED,
        ),
        ("standby_hangs", "starts nothing", standby_python("exec sleep 3600"), S1_ENDED),
        ("standby_shm_full", "has a full /dev/shm", fill_standby, "s1 took the ranks of n2"),
    )
]
OURS = [
    Case(
        name="shim_killed",
        broken="the second shim of a node is killed",
        fault=kill_shim(1),
        per_node=2,
    ),
    Case(
        name="own_agent_hung",
        broken="the agent of the batch host is stopped: its guardian continues it",
        fault=hang_own_agent,
        spares=1,
        steps=500,
    ),
    Case(name="agent_killed", broken="the agent of a node is killed", fault=kill_shim(0)),
    Case(
        name="supervisor_killed",
        broken="robust-srun is killed",
        fault=kill_supervisor,
        expected=ENDED,
        steps=2000,
        epilog=True,  # srun ends with it, and Slurm kills the shims at once
    ),
    Case(
        name="guardian_killed",
        broken="the guardian of a node's agent is killed: Slurm takes its task for dead",
        fault=kill_guardian,
        expected=Expected(gone=N2),
        epilog=True,
    ),
    Case(
        name="strangers",
        broken="150 connections to each port; the agent has 64 descriptors",
        fault=strangers,
        steps=200,
    ),
    Case(
        name="scancel_recovery",
        broken="scancel while the job waits for a node",
        before=no_standby,
        fault=scancel_in_recovery,
        expected=Expected(ends=(CANCELLED,), bad=frozenset({"n2", "s1", "s2"})),
        steps=2000,
    ),
    Case(
        name="scancel_silent_node",
        broken="scancel while a node stands still",
        fault=scancel_silent,
        expected=Expected(ends=(CANCELLED,), bad=N2),
        steps=2000,
    ),
    Case(
        name="time_limit_recovery",
        broken="the time limit ends the job while it waits for a node",
        before=no_standby,
        fault=time_limit,
        expected=Expected(ends=(TIMEOUT,), bad=frozenset({"n2", "s1", "s2"})),
        options="--robust-standby-wait=600 --robust-requeue=never",
        steps=2000,
        limit=150.0,
    ),
]
USERS = [
    Case(
        name="staggered_exits",
        broken="ranks exit 0 at different times, 7 s apart",
        program="--linger 7",
        steps=60,
    ),
    Case(
        name="stdin_reader",
        broken="rank 0 reads stdin; a rank is killed",
        program="--stdin",
        fault=on_rank(signal.SIGKILL),
        expected=Expected(ends=(COMPLETED, FAILED)),
    ),
    Case(
        name="term_save",
        broken="rank 0 saves for 3 s in its SIGTERM handler; another rank is killed",
        program="--term-save 3",
        fault=on_rank(signal.SIGKILL),
    ),
    Case(
        name="same_error_everywhere",
        broken="every rank fails with the same CUDA error at the same step, always",
        program='--error "CUDA error: unspecified launch failure" --error-at 40',
        expected=ENDED,
    ),
    Case(
        name="same_error_again",
        broken="rank 1 fails with the same CUDA error at the same step, on any node",
        program='--error "CUDA error: unspecified launch failure" --error-at 40 --error-rank 1',
        expected=Expected(ends=(FAILED,), gone=frozenset({"n2", "s1", "s2"})),
    ),
    Case(
        name="oom_again",
        broken="rank 1 is killed by SIGKILL at the same step, on any node",
        program="--error SIGKILL --error-at 40 --error-rank 1",
        expected=ENDED,
    ),
    Case(
        name="mmap_truncated",
        broken="a file that all ranks have mapped is cut short: SIGBUS on every node",
        program="--map {dir}/data",
        fault=truncate,
    ),
]
TRUE = [
    Case(name="node_crash", broken="a node crashes", fault=crash, expected=CRASHED),
    Case(
        name="node_hang",
        broken="all of a node stops: nobody knows why, so it is replaced and not reported",
        fault=hang_node,
        expected=Expected(gone=N2, found=N2),
        epilog=True,
    ),
    Case(
        name="mount_dead",
        broken="a mount of one node alone answers nothing any more (stall_limit: 15 s)",
        fault=dead_mount,
        options="--robust-stall-limit=15",
        program="--data {scratch}/data",
        expected=CRASHED,
        epilog=True,
    ),
    Case(name="rank_killed", broken="a rank is killed", fault=on_rank(signal.SIGKILL)),
    Case(name="rank_hung", broken="a rank stands still", fault=on_rank(signal.SIGSTOP)),
]
LOCAL = [*STANDBY, *OURS, *USERS, *TRUE]
