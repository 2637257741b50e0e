"""Stalls of a shared file system: each thing that a job has there, at each time that it is used."""

from __future__ import annotations

import signal
import time
from typing import Any

from bench.chaos.case import Case, Fault, nothing
from bench.chaos.job import Job
from lab.verbs.disruption import Nodes

STALL = 14.0  # s
EVERYBODY = "n[1-3]"
WHAT: dict[str, tuple[str, dict[str, Any]]] = {
    "program": ("program", {"script": "{scratch}/rank.py"}),
    "interpreter": ("interpreter", {"python": "{scratch}/python"}),
    "data": ("training data", {"program": "--data {scratch}/data"}),
    "state": ("state directory", {"state_on_scratch": True}),
    "output": (
        "ranks' output files (%t)",
        {"options": "--output={scratch}/out.%t", "program": "--print"},
    ),
}
START, STEADY, RECOVERY, WARM = "start", "steady", "recovery", "warm"
WHEN = {
    START: "while the job starts",
    STEADY: "while all ranks train",
    RECOVERY: "when a rank dies",
    WARM: "when a rank dies and all would start warm",
}
WAITS = {  # when ranks cannot go on without it; what they have open or in memory hinders nobody
    "program": (START, RECOVERY, WARM),
    "interpreter": (START, RECOVERY, WARM),
    "data": (START, STEADY, RECOVERY, WARM),
    "output": (START,),
}
SILENT = r"on n\[1-3\]: file system \S+ does not answer"
ONE_SILENT = r"file system \S+ does not answer"  # those that start warm do not need it


def stall(nodes: Nodes, seconds: float = STALL, *, kill: bool = False) -> Fault:
    """Return a stall of the scratch on `nodes`; `kill`: rank 1 dies at its beginning."""

    def fault(job: Job) -> None:
        job.lab.stall(nodes)
        if kill:
            job.signal_rank(1, signal.SIGKILL)
        time.sleep(seconds)
        job.lab.resume(nodes)

    return fault


def stall_now(job: Job) -> None:
    """Stall the scratch of all nodes, before the job is submitted."""
    job.lab.stall(EVERYBODY)


def _case(what: str, when: str) -> Case:
    name, settings = WHAT[what]
    return Case(
        name=f"stall_{what}_{when}",
        broken=f"the file system of the {name} stalls for 14 s {WHEN[when]}",
        before=stall_now if when == START else nothing,
        at_start=when == START,
        warm=when == WARM,
        fault=stall(EVERYBODY, kill=when in (RECOVERY, WARM)),
        met=(ONE_SILENT if when == WARM else SILENT) if when in WAITS.get(what, ()) else "",
        **settings,
    )


def _long(what: str, seconds: float) -> Case:
    name, settings = WHAT[what]
    return Case(
        name=f"stall_{what}_{seconds}s",
        broken=f"the file system of the {name} stalls for {seconds} s when a rank dies",
        fault=stall(EVERYBODY, seconds, kill=True),
        limit=120.0,
        long=True,
        **settings,
    )


STALLS = [
    *(_case(what, when) for what in WHAT for when in WHEN),
    Case(
        name="stall_program_half",
        broken="the program's file system stalls for 14 s on two nodes of four when a rank dies",
        fault=stall("n[3-4]", kill=True),
        nodes=4,
        script="{scratch}/rank.py",
    ),
    *(_long(what, seconds) for what in WHAT if what != "output" for seconds in (40, 300)),
]
