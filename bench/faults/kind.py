"""A kind of fault of bench.faults, and where a seed has it hit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.chaos.case import Case
from bench.chaos.job import Job
from bench.chaos.verdict import FAILED, Expected

NODES, PER_NODE = 4, 2  # 8 ranks
JITTER = 0.5  # s; faults must not be in step with the job's own intervals
TRANSIENT, USER, NODE = "transient", "user", "node"
TRANSIENTS = (TRANSIENT, "unknown")  # one death of a process proves nothing of its cause
FAILS = Expected(ends=(FAILED,))
SOON = "--robust-hang-limit=20"  # a hang that nothing proves: the default is 300 s


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice of one seed. `node` and `other` are two nodes that are not the batch host.

    `nodes`: all of the job, the batch host first; `other_rank`: a rank on `other`.
    """

    rank: int
    node: str
    other: str
    step: int
    moment: float
    other_rank: int
    nodes: tuple[str, ...] = tuple(f"n{n}" for n in range(1, NODES + 1))

    @classmethod
    def of(cls, name: str, seed: int) -> Pick:
        """Choose for a kind of fault."""
        dice = random.Random(f"{name}/{seed}")
        node, other = dice.sample([f"n{n}" for n in range(2, NODES + 1)], 2)
        rank = dice.randrange(1, NODES * PER_NODE)
        other_rank = PER_NODE * (int(other[1:]) - 1)
        step, moment = dice.randrange(35, 60), dice.uniform(0.0, JITTER)
        return cls(rank, node, other, step, moment, other_rank)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault; `make` returns its case, without name, size and jitter, for one choice."""

    name: str
    broken: str
    causes: tuple[str, ...]
    """Right causes, in the words of the incidents' records; (): no incident is needed."""
    make: Callable[[Pick], dict[str, Any]]
    error: str = ""
    """The error that the program makes, as of `rank.py --error`; "": the fault is elsewhere."""
    where: str = ""
    """The place of the error: rank, node or all, and "once"."""

    def case(self, seed: int) -> Case:
        """Return the case of a seed."""
        pick = Pick.of(self.name, seed)
        made = Case(name=self.name, broken=self.broken, **self.make(pick))
        inject = made.fault

        def fault(job: Job) -> None:
            time.sleep(pick.moment)
            job.fault_at = time.time()
            inject(job)

        return replace(made, nodes=NODES, per_node=PER_NODE, fault=fault)
