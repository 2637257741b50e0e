"""Kinds of faults that need more than the toy training: gloo, snapshots, a disk, a dead switch."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from bench.chaos.job import Job
from bench.chaos.verdict import Expected
from bench.faults.kind import FAILS, PER_NODE, SOON, TRANSIENTS, USER, Kind, Pick
from lab import LabError

TORCH = str(Path(__file__).with_name("torch_rank.py"))
SLOW_DISK = 0.5  # s
SLOW_AFTER = 150  # steps


def _slow_disk(job: Job, pick: Pick) -> None:
    """Let the scratch of a node answer in turns for the rest of the job.

    The job must know its usual step time first.
    """
    job.wait_steps(SLOW_AFTER)
    job.fault_at = time.time()

    def turns() -> None:
        with contextlib.suppress(LabError, OSError):  # until the lab is gone
            while not (job.dir / "final.json").exists():
                job.lab.stall(pick.node)
                time.sleep(SLOW_DISK)
                job.lab.resume(pick.node)
                time.sleep(0.05)

    threading.Thread(target=turns, daemon=True).start()


def _torch(name: str, broken: str, causes: tuple[str, ...], error: str, **more: Any) -> Kind:
    """Return a fault of a training over gloo, with pipelines, replicas and snapshots."""

    def make(pick: Pick) -> dict[str, Any]:
        return {**_gloo(error, pick.step, pick.rank), **more}

    return Kind(name=name, broken=broken, causes=causes, make=make)


def _gloo(error: str, step: int, *ranks: int) -> dict[str, Any]:
    where = ",".join(map(str, ranks))
    options = f"--error {error} --error-at {step} --error-rank {where}"
    return {"script": TORCH, "program": options, "reference": torch_reference, "limit": 120.0}


def torch_reference(steps: int) -> float:
    """Return the loss of an uninterrupted training over gloo."""
    from bench.faults.torch_rank import reference  # torch takes seconds to import

    return reference(steps)


def _bad(*nodes: str) -> Expected:
    return Expected(bad=frozenset(nodes), found=frozenset(nodes))


def _flip(pick: Pick) -> dict[str, Any]:
    node = pick.nodes[pick.rank // PER_NODE]
    made = _gloo("flip", pick.step, pick.rank)
    # Eight writers import torch on two cores before a step from before the flip is on disk. The
    # training must not be over by then, and by the next step on disk, which shows the flip.
    return {
        **made,
        "program": f"{made['program']} --step-time 0.2",
        "expected": Expected(named=frozenset({node})),
        "steps": 260,
        "limit": 240.0,
    }


WIDER = [
    _torch(
        "size_mismatch_gloo",
        "a rank's tensor has another size in an all-reduce of gloo",
        (USER,),
        "size",
        expected=FAILS,
    ),
    _torch(
        "stuck_group",
        "a rank is stuck in a collective of its pipeline that the others do not call",
        TRANSIENTS,
        "stuck",
        options=SOON,
    ),
    Kind(
        name="bit_flip",
        broken="a bit of a parameter flips on one rank",
        causes=("unknown",),
        make=_flip,
    ),
    Kind(
        name="slow_disk",
        broken="the local disk of a node takes 0.5 s for each read",
        causes=("storage",),
        make=lambda pick: {
            "expected": Expected(named=frozenset({pick.node})),
            "fault": lambda job: _slow_disk(job, pick),
            "program": "--data {scratch}/data",
            "options": "--robust-slow-after=2 --robust-interval=0.1",
            "steps": 290,
            "limit": 120.0,
        },
    ),
    Kind(
        name="switch_dead",
        broken="all nodes but the batch host are cut off for good; three spares are left",
        causes=("shared",),
        make=lambda pick: {
            "expected": Expected(gone=frozenset(pick.nodes[1:])),
            "spares": 3,
            "fault": lambda job: job.lab.outage(pick.nodes[1:]),
            "limit": 120.0,
        },
    ),
]
