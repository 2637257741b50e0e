"""The ranks' Checkpointers as they enrolled, and what each of them saved last."""

from __future__ import annotations

from dataclasses import dataclass, field

from srun_wrapper.job.bus import Address
from srun_wrapper.job.model import Node
from srun_wrapper.protocol.checkpoint_messages import Enrolled, Saved


@dataclass(frozen=True, slots=True)
class StoreAt:
    """One slot's store in the running job."""

    node: Node
    local: int

    @property
    def name(self) -> str:
        return f"{self.node.key[0]}.{self.node.key[1]}.{self.node.key[2]}/{self.local}"

    @property
    def address(self) -> Address:
        return self.node.key, self.local


@dataclass(slots=True)
class Enrolment:
    """Enrolment of a rank's Checkpointer, with the epoch in which it was received."""

    epoch: int
    place: int  # of its node in the world
    at: StoreAt
    said: Enrolled


@dataclass(slots=True)
class Enrolments:
    """All ranks that ever enrolled, and the snapshots of the running epoch. Data only."""

    setting: str = ""
    """Directory of the durable tier that the user set; a Checkpointer may name another."""
    ranks: dict[int, Enrolment] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    """Ranks that enrolled in the running epoch."""
    saved: dict[int, Saved] = field(default_factory=dict)
    count: int = 0
    """Number of enrolments so far."""
    newest: int = 0
    """Newest step that any rank saved in the running epoch."""

    def begin(self) -> None:
        """Forget what belongs to the last epoch."""
        self.saved.clear()
        self.here.clear()
        self.newest = 0

    def enrol(self, rank: int, enrolment: Enrolment) -> None:
        self.ranks[rank] = enrolment
        self.count += 1
        self.here.add(rank)

    def save(self, message: Saved) -> None:
        self.saved[message.rank] = message
        self.newest = max(self.newest, message.step)

    @property
    def world(self) -> int:
        """Number of ranks of the training; 0 while none has reported it."""
        return next((e.said.world for e in self.ranks.values()), 0)

    @property
    def directory(self) -> str:
        """Directory of the durable tier; empty for none."""
        said = next((e.said.directory for e in self.ranks.values()), "")
        return said or self.setting

    @property
    def largest(self) -> int:
        """Bytes of the largest snapshot of a rank; 0 if none was saved."""
        return max((saved.size for saved in self.saved.values()), default=0)

    def mesh(self) -> dict[str, int]:
        """Return the mesh that the ranks named; {} if they named none."""
        return next((dict(e.said.mesh) for e in self.ranks.values()), {})

    def missing(self) -> list[int]:
        """Return the ranks that did not enrol in this epoch, if others did."""
        return sorted(set(range(self.world)) - self.here) if self.here else []
