"""Requests to a Store, its answers and its reports: plain tuples, no behaviour.

A StoreEvent crosses the network as the message that has its name without "Event", and its fields:
a SavedEvent as ``Saved`` (``srun_wrapper/protocol/checkpoint_messages.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from robust_slurm.checkpoint.planning.interval import Cost


class Target(NamedTuple):
    """The store that keeps an owner's replica."""

    rank: int
    """Rank of the peer, for messages to people."""
    host: str
    port: int
    node: str


class Restore(NamedTuple):
    """The state that the ranks of an epoch start from."""

    step: int
    tier: str
    """``memory``, or ``shared``: load the step from the durable directory."""
    shards: dict[int, str]
    """Owner rank → file name in the store's directory."""
    origins: dict[int, int] = {}  # noqa: RUF012 - a default
    """Rank → owner of the snapshot that it goes on with, in a world of another size."""
    anew: tuple[int, ...] = ()
    """Ranks among these that did not exist before: no saved generators are theirs."""


class Holding(NamedTuple):
    """One snapshot that a store has."""

    owner: int
    step: int
    world: int
    needs: tuple[int, ...]
    tier: str
    """``memory`` (own or fetched) or ``replica``."""
    file: str
    """Name in the store's directory."""
    size: int
    ok: bool
    """The digest verified now agrees with the one taken when it was complete."""
    why: str
    epoch: int = 0
    """Epoch of the save: snapshots of one step belong together only if this is equal too."""
    same: int = -1
    line: int = 0
    """See ``Snapshot``."""


WITHDRAWN = "withdrawn by its rank: "
"""Begins the ``why`` of a snapshot that was wrong when it was made, so that all its copies are."""


class WantedSnapshot(NamedTuple):
    """A snapshot to get from the store at ``host``; from this node's disk if that is empty."""

    owner: int
    step: int
    host: str
    port: int


class FetchOutcome(NamedTuple):
    owner: int
    step: int
    ok: bool
    why: str
    file: str
    seconds: float
    bytes: int
    """Received or written."""


class EnrolledEvent(NamedTuple):
    epoch: int
    rank: int
    world: int
    mesh: dict[str, int]
    needs: tuple[int, ...]
    directory: str
    """The durable tier's directory; empty for none."""
    every: int
    """Steps between durable checkpoints; 0: by time only."""
    size: int
    """Bytes of a snapshot, as far as known."""
    fixed: str = ""
    """Why a world of another size could not go on with its state; empty: it could."""
    lengths: tuple[int, ...] = ()
    """Lengths of the dimensions that are cut among all ranks (FSDP2)."""
    shards: int = 0
    """Number of blocks into which each replica cuts its parameters (HSDP); 0: it does not."""
    stages: int = 0
    """Number of stages of the pipeline in its mesh, 1 for none; 0: its package is older, and cannot
    tell them apart."""


class SavedEvent(NamedTuple):
    """A rank's newest complete snapshot; at most two a second per rank."""

    epoch: int
    rank: int
    step: int
    replicated: int | None
    size: int
    copy_s: float
    blocked_s: float
    same: tuple[tuple[int, int], ...] = ()
    """(step, ``Snapshot.same``) of the newest steps that were not yet reported."""
    cost: Cost = Cost(0.0, 0.0, 0.0, 0.0)
    safe: int = -1
    """Newest that has a replica, or can have none."""
    have: tuple[int, ...] = ()
    """Steps up to it that are whole in memory: those not yet reported, and some that were."""


class PersistedEvent(NamedTuple):
    rank: int
    step: int
    ok: bool
    why: str
    seconds: float


class CommittedEvent(NamedTuple):
    step: int
    ok: bool
    why: str


class AlarmEvent(NamedTuple):
    rank: int
    """-1: of no rank."""
    text: str


class ResumedEvent(NamedTuple):
    epoch: int
    rank: int
    step: int


StoreEvent = (
    EnrolledEvent | SavedEvent | PersistedEvent | CommittedEvent | AlarmEvent | ResumedEvent
)
