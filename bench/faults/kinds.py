"""The kinds of faults of bench.faults, each on a rank, a node and a moment that a seed chooses."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.chaos.job import Job
from bench.chaos.shared import suspend
from bench.chaos.stalls import stall
from bench.chaos.verdict import Expected
from bench.faults.kind import FAILS, NODE, SOON, TRANSIENTS, USER, Kind, Pick
from bench.faults.wider import WIDER

ECC = "CUDA error: uncorrectable ECC error encountered"
SIZES = "op.preamble.length <= op.nbytes. 16 vs 8"


def _bad(*nodes: str) -> Expected:
    return Expected(bad=frozenset(nodes), found=frozenset(nodes))


def _program(error: str, pick: Pick, where: str) -> str:
    rank, node = f"--error-rank {pick.rank}", f"--error-node {pick.node}"
    options = {"rank": rank, "node": node, "all": ""}[where.split()[0]]
    once = "--error-once" if where.endswith("once") else ""
    return f"--error {shlex.quote(error)} --error-at {pick.step} {options} {once}"


def _in_program(
    name: str, broken: str, causes: tuple[str, ...], error: str, where: str, **more: Any
) -> Kind:
    """Return a fault of the program."""

    def make(pick: Pick) -> dict[str, Any]:
        expected = _bad(pick.node) if where == "node" else Expected() if "once" in where else FAILS
        return {"expected": expected, "program": _program(error, pick, where), **more}

    return Kind(name=name, broken=broken, causes=causes, make=make, error=error, where=where)


def _slow(name: str, broken: str, causes: tuple[str, ...], where: str) -> Kind:
    """Return a fault that makes steps slow: the node is to be named, and nothing done."""

    def make(pick: Pick) -> dict[str, Any]:
        slow = replace(pick, step=pick.step + 120)  # the job must know its usual step time
        return {
            "expected": Expected(named=frozenset({pick.node} if where == "node" else ())),
            "program": _program("slow", slow, where),
            "options": "--robust-slow-after=2 --robust-interval=0.1",
            "steps": 260,
        }

    return Kind(name=name, broken=broken, causes=causes, make=make)


def _of_node(name: str, broken: str, act: Callable[[Job, Pick], object], **more: Any) -> Kind:
    """Return a fault that makes the chosen node bad."""

    def make(pick: Pick) -> dict[str, Any]:
        return {"expected": _bad(pick.node), "fault": lambda job: act(job, pick), **more}

    return Kind(name=name, broken=broken, causes=(NODE,), make=make)


def _harmless(name: str, broken: str, act: Callable[[Job, Pick], object], **more: Any) -> Kind:
    """Return a fault that ends by itself or is nobody's: it must not be held against a node."""

    def make(pick: Pick) -> dict[str, Any]:
        return {"fault": lambda job: act(job, pick), **more}

    return Kind(name=name, broken=broken, causes=(), make=make)


def _signal(number: signal.Signals) -> Kind:
    def make(pick: Pick) -> dict[str, Any]:
        return {"fault": lambda job: job.signal_rank(pick.rank, number)}

    name = number.name.lower()
    return Kind(name=name, broken=f"{number.name} to a rank", causes=TRANSIENTS, make=make)


def _crash(job: Job, pick: Pick) -> None:
    job.lab.crash(pick.node)


def _hang(job: Job, pick: Pick) -> None:
    job.lab.hang(pick.node)


def _crash_then_kill(job: Job, pick: Pick) -> None:
    job.lab.crash(pick.node)
    time.sleep(0.5)
    job.signal_rank(pick.other_rank, signal.SIGKILL)


def _crash_two(job: Job, pick: Pick, apart: float) -> None:
    job.lab.crash(pick.node)
    time.sleep(apart)
    job.lab.crash(pick.other)


def _double(name: str, broken: str, apart: float) -> Kind:
    def make(pick: Pick) -> dict[str, Any]:
        return {
            "expected": _bad(pick.node, pick.other),
            "fault": lambda job: _crash_two(job, pick, apart),
            "limit": 120.0,
        }

    return Kind(name=name, broken=broken, causes=(NODE,), make=make)


def _flap(job: Job, pick: Pick) -> None:
    for _ in range(2):
        job.lab.outage(pick.node, 1)
        time.sleep(3)


def _partition(seconds: int) -> Kind:
    """Return an outage of two nodes, too short for a reboot."""
    why = "they may be replaced, but not reported"
    return Kind(
        name=f"partition_{seconds}s",
        broken=f"two nodes of four are cut off for {seconds} s: {why}",
        causes=(),
        make=lambda pick: {
            "fault": lambda job: job.lab.outage(f"{pick.node},{pick.other}", seconds),
            "expected": Expected(gone=frozenset((pick.node, pick.other))),
            # Slurm may kill their robust-task before it can clean up.
            "epilog": True,
        },
    )


def _slow_link(job: Job, pick: Pick) -> None:
    job.lab.slow(pick.node, delay_ms=400)
    time.sleep(10)
    job.lab.ask("heal", node=pick.node)


def _away(job: Job, pick: Pick) -> None:
    job.lab.daemon("head", "slurmctld", "stop")
    job.lab.crash(pick.node)
    time.sleep(35)
    job.lab.daemon("head", "slurmctld", "start")


PROGRAM = [
    _in_program("exit_code", "a rank ends with code 3", (USER, *TRANSIENTS), "exit:3", "rank once"),
    *map(_signal, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGSTOP)),
    _in_program(
        "loader_deadlock",
        "a data-loader worker of a rank is deadlocked",
        TRANSIENTS,
        "loader",
        "rank once",
        options=SOON,
    ),
    _in_program(
        "rank_deadlock",
        "a rank waits for its own lock",
        TRANSIENTS,
        "deadlock",
        "rank once",
        options=SOON,
    ),
    _in_program("oom_kill", "a rank ends itself by SIGKILL", TRANSIENTS, "SIGKILL", "rank once"),
    _in_program(
        "oom_kill_again", "the same, whenever it is at that step", (USER,), "SIGKILL", "rank"
    ),
    _in_program("segv_again", "SIGSEGV of a rank, at each try", (USER,), "SIGSEGV", "rank"),
    _in_program(
        "size_mismatch", "gloo's error of sizes that differ, on a rank", (USER,), SIZES, "rank"
    ),
    _in_program("user_all", "an exception on all ranks", (USER,), "bad shape of a batch", "all"),
    _in_program("user_rank", "an exception on one rank only", (USER,), "no such expert: 9", "rank"),
    _in_program(
        "user_data", "an exception at one rank's data", (USER,), "cannot decode sample 7", "rank"
    ),
    _in_program(
        "user_once", "an exception, once", (USER, *TRANSIENTS), "queue is empty", "rank once"
    ),
    _in_program(
        "cuda_all",
        "the same CUDA error on all ranks",
        (USER, "shared"),
        "CUDA error: unspecified launch failure",
        "all",
    ),
    _in_program("nan_all", "a loss of NaN on all ranks, always", (USER,), "nan", "all"),
    _in_program("nan_rank", "a loss of NaN of a rank's own data, always", (USER,), "nan", "rank"),
    _in_program("nan_once", "the same, once", TRANSIENTS, "nan", "rank once"),
]
MACHINE = [
    _in_program("ecc", "an ECC error of CUDA on each rank of a node", (NODE,), ECC, "node"),
    _in_program("io_error", "EIO on each rank of a node", (NODE, "unknown"), "EIO", "node"),
    _in_program("nan_node", "a loss of NaN on the ranks of a node", (NODE,), "nan", "node"),
    _slow("slow_rank", "steps take ten times as long on a node", ("unknown",), "node"),
    _of_node("node_crash", "a node crashes", _crash),
    Kind(
        name="node_hang",
        broken="all of a node stops, nobody knows why: it may be replaced, but not reported",
        causes=("shared",),
        make=lambda pick: {
            "fault": lambda job: _hang(job, pick),
            "expected": Expected(gone=frozenset({pick.node})),
            "epilog": True,
        },
    ),
    _of_node(
        "mount_dead",
        "a mount of one node answers nothing any more (stall_limit: 15 s)",
        lambda job, pick: job.lab.stall(pick.node),
        options="--robust-stall-limit=15",
        program="--data {scratch}/data",
        epilog=True,
    ),
    _of_node(
        "crash_and_kill", "a node crashes; a rank elsewhere dies 0.5 s later", _crash_then_kill
    ),
    _of_node("crash_no_slurmctld", "a node crashes while slurmctld is away", _away, limit=120.0),
    _double("crash_two", "two nodes of four crash at once", 0.0),
    _double("crash_crash", "a node crashes, and another one 5 s later", 5.0),
]
SHARED = [
    _in_program(
        "estale_all",
        "the file system answers ESTALE once, on all ranks",
        ("shared", *TRANSIENTS),
        "ESTALE",
        "all once",
    ),
    _in_program(
        "disk_full",
        "the shared file system is full once, on all ranks",
        ("shared", USER, *TRANSIENTS),
        "ENOSPC",
        "all once",
    ),
    _harmless(
        "stall_all",
        "the file system of the training data stalls for 14 s on all nodes",
        lambda job, pick: stall(pick.nodes)(job),
        program="--data {scratch}/data",
    ),
    _harmless(
        "switch_3s",
        "all nodes but the batch host are cut off for 3 s",
        lambda job, pick: job.lab.outage(pick.nodes[1:], 3),
    ),
    _partition(3),
    _partition(6),  # long enough for them to be replaced on a slow machine, too
    Kind(
        name="flap",
        broken="the link of a node is off for 1 s, twice; only a report of two losses may stand",
        causes=(),
        make=lambda pick: {
            "fault": lambda job: _flap(job, pick),
            "expected": Expected(flaps=frozenset({pick.node}), gone=frozenset({pick.node})),
            "epilog": True,  # as in the outages of two nodes
        },
    ),
    _slow("slow_all", "steps take ten times as long on all nodes", (), "all"),
    _harmless("slow_link", "400 ms of delay to a node for 10 s", _slow_link),
    _harmless(
        "batch_host_2s",
        "the batch host is cut off for 2 s",
        lambda job, pick: job.lab.outage(pick.nodes[0], 2),
    ),
    _harmless("suspend", "Slurm suspends the job for 15 s", lambda job, _: suspend(job)),
    _harmless(
        "pause_all", "all nodes pause for 8 s", lambda job, pick: job.lab.pause(pick.nodes, 8)
    ),
    _harmless(
        "preemption",
        "Slurm preempts the job: SIGKILL of everything, and back into the queue",
        lambda job, _: job.scontrol("requeue", str(job.id)),
        limit=240.0,
    ),
]
KINDS = {kind.name: kind for kind in [*PROGRAM, *MACHINE, *SHARED, *WIDER]}
