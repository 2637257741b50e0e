"""The ranks' Checkpointers as they enrolled, and what each of them saved last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from robust_slurm.resizing.change import Resize, owners
from robust_slurm.resizing.stages import is_of, pipelined, ranks_by_stage, successors
from srun_wrapper.job.bus import Address
from srun_wrapper.job.model import Node
from srun_wrapper.protocol.checkpoint_messages import Enrolled, Saved

KEPT = 4  # worlds of other sizes; the snapshots of older ones are gone


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


@dataclass(frozen=True, slots=True)
class EarlierWorld:
    """A world of another size, whose snapshots the present ranks can go on with."""

    size: int
    owners: Mapping[int, tuple[int, ...]]
    """Present rank -> its ranks whose own snapshots that needs; see ``resize.owners``."""
    anew: frozenset[int]
    """Present ranks that were none in it."""
    lengths: tuple[int, ...] = ()
    """See ``Enrolled``."""
    stages: tuple[tuple[int, ...], ...] = ()
    """Ranks of each stage in it; see ``Enrolments.stages``."""

    def after(self, change: Resize, original: int) -> EarlierWorld:
        """Return it as the ranks after another change need it."""
        origin = {rank: self.owners[old][0] for rank, old in change.origin.items()}
        lost = {rank for rank, old in change.origin.items() if old in self.anew}
        found = owners(origin, self.size, change.new, original, self.lengths, self.stages)
        anew = frozenset(change.anew | lost)
        return EarlierWorld(self.size, found, anew, self.lengths, self.stages)


@dataclass(slots=True)
class Enrolments:
    """All ranks that ever enrolled, and the snapshots of the running epoch. Data only."""

    setting: str = ""
    """Directory of the durable tier that the user set; a Checkpointer may name another."""
    ranks: dict[int, Enrolment] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    """Ranks that enrolled in the running epoch."""
    saved: dict[int, Saved] = field(default_factory=dict)
    written: dict[tuple[int, str], int] = field(default_factory=dict)
    """Step that was last written to the durable tier, by rank and the name of the node."""
    count: int = 0
    """Number of enrolments so far."""
    newest: int = 0
    """Newest step that any rank saved in the running epoch."""
    earlier: list[EarlierWorld] = field(default_factory=list)
    """Worlds of other sizes, the last one first."""
    _stages: tuple[tuple[int, ...], ...] = ()  # of a world whose ranks have not named a mesh yet

    def begin(self) -> None:
        """Forget what belongs to the last epoch."""
        self.saved.clear()
        self.written.clear()
        self.here.clear()
        self.newest = 0

    def enrol(self, rank: int, enrolment: Enrolment) -> None:
        if rank in self.here:  # it begins anew, maybe from an earlier step
            self.written = {key: step for key, step in self.written.items() if key[0] != rank}
        self.ranks[rank] = enrolment
        self.count += 1
        self.here.add(rank)

    def resize(self, change: Resize, original: int, places: Sequence[Node]) -> None:
        """Take the ranks over into a world of another size, whose nodes these are.

        ``original``: size of the first world.
        """
        lengths = tuple(sorted({n for each in self.ranks.values() for n in each.said.lengths}))
        stages = self.stages()
        found = owners(change.origin, change.old, change.new, original, lengths, stages)
        last = EarlierWorld(change.old, found, change.anew, lengths, stages)
        self._stages = tuple(tuple(own) for _, own in successors(stages, change.origin))
        self.earlier = [last, *(each.after(change, original) for each in self.earlier)][:KEPT]
        before, self.ranks = self.ranks, {}
        origin = sorted(change.origin.items())
        stores = {each.at.local for each in before.values()}  # of a torchrun's ranks: one a node
        for place, numbers in enumerate(change.ranks):
            for local, rank in enumerate(numbers):
                old = before.get(change.origin[rank])
                if old is not None:
                    needs = tuple(r for r, was in origin if was in old.said.needs)
                    said = structs.replace(
                        old.said, rank=rank, world=change.new, mesh={}, needs=needs
                    )
                    at = StoreAt(places[place], local if local in stores else old.at.local)
                    self.ranks[rank] = Enrolment(old.epoch, place, at, said)
        self.count += 1
        self.begin()

    def places(self) -> list[tuple[int, ...]] | None:
        """Return the ranks of each place, by their numbers on the node; None if not all are known.

        Of a torchrun they are more than the task slots.
        """
        known = len(self.ranks)
        if not known or known != self.world or sorted(self.ranks) != list(range(known)):
            return None
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, each in self.ranks.items():
            found.setdefault(each.place, []).append((each.at.local, rank))
        if sorted(found) != list(range(len(found))):
            return None
        return [tuple(r for _, r in sorted(found[place])) for place in range(len(found))]

    def groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that hold the same state, each group in order."""
        found: dict[int, set[int]] = {}
        for rank, each in self.ranks.items():
            found.setdefault(min(each.said.needs), set()).update((rank, *each.said.needs))
        return [tuple(sorted(ranks)) for _, ranks in sorted(found.items())]

    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage of a pipeline, whose replicas compute their shares
        together; () if each rank computes shares of its own. Raises ValueError."""
        said = [each.said for each in self.ranks.values()]
        named = [pipelined(each.mesh) for each in said if each.mesh]
        if not named:
            if self._stages and any(each.stages != len(self._stages) for each in said):
                raise ValueError("the ranks name no mesh of their pipelines")
            return self._stages
        if not any(named):
            return ()
        if len(said) != self.world:
            raise ValueError("some ranks have no Checkpointer")
        if not is_of(named[0], self.world):
            raise ValueError("the ranks name a mesh of another world")
        found = tuple(ranks_by_stage(named[0], self.world).values())
        if any(each.stages == 0 for each in said):
            raise ValueError(
                "some ranks have an older robust_slurm, which knows no pipeline stages"
            )
        same = all([*mesh.items()] == [*named[0].items()] for mesh in named)
        if not same or any(each.stages != len(found) for each in said):
            raise ValueError("the ranks name different meshes")
        return found

    def cut(self) -> tuple[tuple[int, ...], int]:
        """Return how the ranks' parameters are cut, as ``lengths`` and ``shards`` of ``Enrolled``.

        Raises ValueError if they do not agree.
        """
        found = {(each.said.lengths, each.said.shards) for each in self.ranks.values()}
        if len(found) > 1:
            raise ValueError("the ranks' parameters are cut in different ways")
        return found.pop() if found else ((), 0)

    def fixed(self) -> str:
        """Return why a world of another size cannot go on with the ranks' state; "" if it can."""
        return next((e.said.fixed for e in self.ranks.values() if e.said.fixed), "")

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
