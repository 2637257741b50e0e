"""Messages between the supervisor and the slots' stores of snapshots; the agents relay them."""

from __future__ import annotations

import msgspec

from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store.events import FetchOutcome, Holding, Target, WantedSnapshot
from srun_wrapper.protocol.base import Message, NumberedMessage, Reply

# ---------------------------------------------------------------- slot -> supervisor
# A message that has a store event's name without "Event" has the fields of that event, too.


MERGED = 256  # steps of a rank in a report at most


class StoreReady(NumberedMessage):
    """A slot's store of snapshots listens for peers; port 0: the slot has none."""

    local: int
    port: int
    host: str = ""  # of checkpoint_interface; empty: the node's address


class Enrolled(NumberedMessage):
    """A rank's Checkpointer has introduced itself to its slot's store."""

    epoch: int
    local: int
    rank: int
    world: int
    mesh: dict[str, int]  # dimension -> size, the last varies fastest; empty: none was named
    needs: tuple[int, ...]  # ranks whose snapshots restore this one
    directory: str  # of the durable tier, "" for none
    every: int  # steps between durable checkpoints, 0: by time only
    size: int  # bytes of a snapshot, as far as known
    fixed: str = ""  # why a world of another size could not go on with its state
    lengths: tuple[int, ...] = ()  # those of the dimensions that are cut among all ranks (FSDP2)
    shards: int = 0  # blocks into which each replica cuts its parameters (HSDP); 0: it does not
    stages: int = 0  # of the pipeline in its mesh, 1: none; 0: its package cannot tell them apart


class Saved(Message):
    """The newest step that a rank has in memory, and that its replica has; in a Report."""

    epoch: int
    rank: int
    step: int
    replicated: int | None
    size: int
    copy_s: float
    blocked_s: float
    same: tuple[tuple[int, int], ...] = ()  # step, checksum of what its group shares
    cost: Cost = Cost(0.0, 0.0, 0.0, 0.0)
    safe: int = -1  # newest step that has a replica, or can have none
    have: tuple[int, ...] = ()  # steps up to it that can be used; some may be from earlier reports

    def after(self, older: Saved | None) -> Saved:
        """Return this message with the facts of an older one that will not be sent."""
        if older is None or older.epoch != self.epoch:
            return self
        same, have = (*older.same, *self.same), tuple(sorted({*older.have, *self.have}))
        return msgspec.structs.replace(self, same=same[-MERGED:], have=have[-MERGED:])


class Persisted(NumberedMessage):
    """A snapshot was written to the durable tier, or could not be."""

    rank: int
    step: int
    ok: bool
    why: str
    seconds: float


class Committed(NumberedMessage):
    """A durable checkpoint is complete, or never will be."""

    step: int
    ok: bool
    why: str


class Alarm(NumberedMessage):
    """A fact about checkpoints that a person should know; training goes on."""

    rank: int
    text: str


class Resumed(NumberedMessage):
    """A rank has its state back."""

    epoch: int
    rank: int
    step: int


class Stock(Reply):
    """One slot's answer to TakeStock."""

    local: int
    held: tuple[Holding, ...]


class Moved(Reply):
    """One slot's answer to Fetch or Flush."""

    local: int
    results: tuple[FetchOutcome, ...]


FromStore = StoreReady | Enrolled | Saved | Persisted | Committed | Alarm | Resumed | Stock | Moved

# ---------------------------------------------------------------- supervisor -> slot


class TakeStock(Message):
    """Request for the list of the store's snapshots."""

    token: int
    step: int | None = None  # of this step only, every byte checked against its digest


class StandAt(Message):
    """Order to the ranks to wait after this step, until another one is named; -1: for none."""

    step: int


class ReplicaTargets(Message):
    """Destinations of the replicas of this node's ranks."""

    targets: dict[int, Target | None]  # by rank; None: nowhere


class Fetch(Message):
    """Get snapshots from other stores into this slot's."""

    token: int
    local: int
    items: tuple[WantedSnapshot, ...]


class MakeRoom(Message):
    """Order to reserve memory in each slot for fetching ``files`` snapshots of ``size`` bytes."""

    size: int
    files: int


class PersistAt(Message):
    """Order to write the snapshot of this step to the durable tier when it comes."""

    step: int


class Unshare(Message):
    """Notice that these ranks no longer hold the same: each saves all of its state from now on."""

    ranks: tuple[int, ...]


class Complete(Message):
    """All ranks have ``step`` in memory, and their replicas: older ones may be overwritten."""

    step: int  # -1: no new one is known
    passed: int  # no rank has to be waited for up to this one; some may lack it


class SaveEvery(Message):
    """Order to save only multiples of ``every`` in memory from step ``first`` on."""

    every: int
    first: int


class Flush(Message):
    """Write these snapshots (owner, file) to the durable tier now."""

    token: int
    local: int
    step: int
    owners: tuple[tuple[int, str], ...]
    commit_world: int  # ranks of the whole checkpoint, for the one slot that commits it; else 0
    deadline: float  # seconds


ToStore = (
    TakeStock
    | StandAt
    | ReplicaTargets
    | Fetch
    | MakeRoom
    | PersistAt
    | Unshare
    | SaveEvery
    | Complete
    | Flush
)
