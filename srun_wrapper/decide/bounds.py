"""Choose the suspects to evict: no more than can be replaced without losing a snapshot (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Copies = Mapping[str, frozenset[str]]
"""For each node the nodes that keep the replicas of its ranks' newest snapshots; itself if none."""

RULE = (
    "Of several suspects the likeliest are evicted first: those named most often since the last "
    "progress, then those that this job has reported before, then in the order of the evidence. "
    "The first one is evicted if a node can take its place; each further one only if another node "
    "can, and a copy of every newest snapshot stays in the job. Lost and proven bad nodes are not "
    "bounded. The others stay, and robust-srun prints why; if the next hang names none but those "
    "that stayed for their copies, it acquits nobody, and the next of them is evicted."
)
NO_ROOM = "no node is left to take its place"
LAST_COPY = "the last copy of a snapshot would go with it"


class Bounded(NamedTuple):
    """The suspects to evict, the likeliest first, and for each that stays the reason."""

    evict: tuple[str, ...]
    stay: tuple[tuple[str, str], ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The suspects that stay for their copies alone."""
        return tuple(node for node, why in self.stay if why == LAST_COPY)

    @property
    def told(self) -> str:
        """The suspects that stay, in words; "" if none does."""
        return "".join(f"; suspect {node} stays: {why}" for node, why in self.stay)


def likeliest(
    suspects: Sequence[str], named: Mapping[str, int], before: Mapping[str, int]
) -> tuple[str, ...]:
    """Order suspects. ``named``: times since the last progress; ``before``: earlier evidence."""
    return tuple(sorted(suspects, key=lambda n: (-named.get(n, 0), -before.get(n, 0))))


def bounded(suspects: Sequence[str], must: Collection[str], room: int, copies: Copies) -> Bounded:
    """Choose the suspects to evict beside ``must``. ``suspects``: the likeliest first.

    ``room``: number of replacement nodes in all. Snapshots that are lost with ``must`` do not
    count against the suspects.
    """
    evict: list[str] = []
    stay: list[tuple[str, str]] = []
    free = room - len(must)
    for node in suspects:
        if node in must:
            continue
        gone = {*must, *evict}
        if len(evict) >= free:
            stay.append((node, NO_ROOM))
        elif evict and not loses(gone, copies) and loses({*gone, node}, copies):
            stay.append((node, LAST_COPY))
        else:
            evict.append(node)
    return Bounded(tuple(evict), tuple(stay))


def loses(gone: Collection[str], copies: Copies) -> bool:
    """True if the loss of these nodes takes a snapshot and its replica."""
    return any(not copies.get(node, frozenset()).isdisjoint(gone) for node in gone)


OFF = "min_nodes is 0"
# Open MPI's words, then MPICH's, also of MPI_Init_thread.
_NO_INIT = re.compile(
    r"error occurred in MPI_Init|before MPI_INIT completed|MPI_Init(_thread)?\(.* failed", re.I
)


@dataclass(frozen=True, slots=True)
class Means:
    """Means that a recovery can use now."""

    spares: int
    standby_nodes: int  # how many nodes may still be asked from the standby partition
    requeue: bool
    max_restarts: int
    never: str = ""  # why the ranks cannot be started again at all
    early: bool = False
    """No step was ever seen, in the program's first minute, and it is not to be restarted then."""
    other_code: str = ""  # another version of the code that the ranks can start with, in words
    copies: Copies = field(default_factory=dict)
    before: Mapping[str, int] = field(default_factory=dict)
    """Evidence of earlier runs of the job, by node: the higher, the stronger."""
    world: str = ""  # the --mpi under which the ranks cannot be started again in the step
    requeues: int = 0  # of the job, before this run
    stepped: bool = False  # ranks have made training steps in this job step: the command can run
    not_fewer: Callable[[tuple[str, ...]], str] = lambda _names: OFF
    """Why the job cannot go on without these nodes and with nothing in their places; "": it can."""
    resize_failed: bool = False  # the ranks have made no step in a world of this size
    again: bool = False  # ranks were started before in this job step

    @property
    def hindered(self) -> str:
        """The reason for which the ranks cannot be started again in the job's step; "": they
        can."""
        return self.never or self.one_world("")

    def one_world(self, tail: str) -> str:
        """Return why ranks that ended so cannot be started again in the step; "": they can.

        ``tail``: the last output of the first one. Where Slurm makes one MPI world of every step
        (MpiDefault, SLURM_MPI_TYPE), torch's ranks can be started again, those of an MPI program
        cannot.
        """
        if self.world:
            return f"--mpi={self.world}: an MPI world cannot be started again in the step"
        if self.again and _NO_INIT.search(tail):
            return "MPI cannot be started again in the step; with --mpi=TYPE it is not tried"
        return ""
