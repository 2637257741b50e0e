"""What the supervisor and the slots' stores of snapshots say to each other, through the agents."""

from __future__ import annotations

import msgspec

from srun_wrapper.message_base import Event, Message

# ---------------------------------------------------------------- slot -> supervisor


class StoreReady(Event):
    """A slot's store of snapshots listens for peers; port 0: the slot has none."""

    local: int
    port: int


class Enrolled(Event):
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


class Saved(Message):
    """The newest step that a rank has in memory, and that its replica has; in a Report."""

    epoch: int
    rank: int
    step: int
    replicated: int | None
    size: int
    copy_s: float
    blocked_s: float


class Persisted(Event):
    """A snapshot was written to the durable tier, or could not be."""

    rank: int
    step: int
    ok: bool
    why: str
    seconds: float


class Committed(Event):
    """A durable checkpoint is complete, or never will be."""

    step: int
    ok: bool
    why: str


class Alarm(Event):
    """Something about checkpoints that a person should know; training goes on."""

    rank: int
    text: str


class Resumed(Event):
    """A rank has its state back."""

    epoch: int
    rank: int
    step: int


class Held(msgspec.Struct, array_like=True):
    """One snapshot that a store has, see ``robust_slurm.checkpoint.store.Holding``."""

    owner: int
    step: int
    world: int
    needs: tuple[int, ...]
    tier: str
    file: str
    size: int
    ok: bool
    why: str
    epoch: int


class Stock(Message):
    """One slot's answer to TakeStock."""

    token: int
    local: int
    held: tuple[Held, ...]


class Done(msgspec.Struct, array_like=True):
    """What became of one snapshot that was fetched or flushed."""

    owner: int
    step: int
    ok: bool
    why: str
    file: str
    seconds: float
    size: int


class Moved(Message):
    """One slot's answer to Fetch or Flush."""

    token: int
    local: int
    results: tuple[Done, ...]


FromStore = StoreReady | Enrolled | Saved | Persisted | Committed | Alarm | Resumed | Stock | Moved

# ---------------------------------------------------------------- supervisor -> slot


class Restore(msgspec.Struct, array_like=True):
    """What the ranks of a node are restored from."""

    step: int
    tier: str  # "memory": files of this node's stores; "shared": the durable checkpoint of the step
    shards: dict[int, str]  # owner rank -> file name


class TakeStock(Message):
    """Which snapshots do you have?"""

    token: int
    step: int | None = None  # of this step only, every byte held against its digest


class ReplicaTo(msgspec.Struct, array_like=True):
    """Where a rank's replica goes; port 0: nowhere."""

    owner: int
    holder: int
    node: str
    host: str
    port: int


class Place(Message):
    """Where this node's ranks send their replicas."""

    targets: tuple[ReplicaTo, ...]


class FetchItem(msgspec.Struct, array_like=True):
    owner: int
    step: int
    host: str  # "": this node's own disk
    port: int


class Fetch(Message):
    """Get snapshots from other stores into this slot's."""

    token: int
    local: int
    items: tuple[FetchItem, ...]


class PersistAt(Message):
    """The snapshot of this step goes to the durable tier when it comes."""

    step: int


class Flush(Message):
    """Write these snapshots (owner, file) to the durable tier now."""

    token: int
    local: int
    step: int
    owners: tuple[tuple[int, str], ...]
    commit_world: int  # ranks of the whole checkpoint, for the one slot that commits it; else 0
    deadline: float  # seconds


ToStore = TakeStock | Place | Fetch | PersistAt | Flush
