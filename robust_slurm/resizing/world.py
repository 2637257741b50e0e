"""``robust_slurm.world()`` and ``accumulate()``: keep the global batch while nodes are missing.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

from .shares import read_resized, shares_of
from .stages import is_of, replica_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

RESIZED = "ROBUST_RESIZED"
REPLICA = "ROBUST_REPLICA_RANKS"
"""Ranks of a replica of the model, set beside RESIZED if these compute their shares together."""


class _Pass:
    """A pass of ``accumulate`` without a share of this rank's own."""

    def __init__(self) -> None:
        self.repeats = False  # a loader has given its last batch again
        self.scaled = False  # the script has read the factor, which is 0


class _Now:
    pass_of_others: _Pass | None = None


_now = _Now()


class TrainingWorld:
    """The ranks of the running training. ``shares``: those of the global batch that are this
    rank's to compute; ``scale``: factor of the loss of each, so that the mean of all ranks'
    gradients is that of the whole batch."""

    def __init__(
        self, rank: int, size: int, original: int, mesh: Mapping[str, int] | None = None
    ) -> None:
        """``mesh``: of ``size`` ranks."""
        self.rank = rank
        self.size = size
        self.original = original
        """Number of ranks that the job began with."""
        replica, replicas = replica_of(rank, size, mesh or {})
        self.replica_ranks = size // replicas
        """Number of ranks that compute a share together: the stages of a pipeline; else 1."""
        self.share_count = original // self.replica_ranks
        """Number of shares of a step's batch: ``original``, or the replicas of such ranks in it."""
        self.shares = shares_of(replica, replicas, self.share_count)

    @property
    def scale(self) -> float:
        """Factor of a share's loss; 0 in a pass that is only for the ranks with more shares."""
        if (at := _now.pass_of_others) is not None:
            at.scaled = True
            return 0.0
        return self.size / self.original

    @property
    def resized(self) -> bool:
        """True while the job trains with fewer ranks than it began with."""
        return self.size != self.original

    def __repr__(self) -> str:
        return (
            f"TrainingWorld(rank={self.rank}, size={self.size}, original={self.original}, "
            f"shares={self.shares} of {self.share_count})"
        )


def world(mesh: Any = None) -> TrainingWorld:
    """Return the world of this rank: its size, the size that the job began with, its shares.

    With ``--robust-min-nodes`` the job may go on with fewer ranks than it began with; else, and
    outside robust-srun, each rank has the one share of its own number. ``mesh``: as for
    ``Checkpointer``, of the ranks that are there now; needed with pipeline parallelism, where the
    ranks of a replica have the share of its number. Raises ValueError for a mesh of another world,
    and RuntimeError without one, or with one of other replicas, if the job trains on with fewer.
    """
    sizes = _sizes(mesh)
    found = this_world(sizes)
    if not is_of(sizes, found.size):
        raise ValueError(f"mesh: {sizes} is not of the {found.size} ranks of this world")
    together = os.environ.get(REPLICA, "1")
    if found.resized and together != str(found.replica_ranks):
        raise RuntimeError(
            f"the job trains on with fewer ranks, {together} of which are a replica of the model: "
            "give robust_slurm.world() and accumulate() the mesh that Checkpointer gets"
        )
    return found


def this_world(mesh: Mapping[str, int] | None = None) -> TrainingWorld:
    """Return ``world``, as far as the environment and the mesh say; one that does not fit is
    ignored."""
    rank, size = _number("RANK", "SLURM_PROCID"), _number("WORLD_SIZE", "SLURM_NTASKS")
    if rank is None or size is None or not 0 <= rank < size:
        rank, size = 0, 1
    found = read_resized(os.environ.get(RESIZED, ""))
    original = found[0] if found is not None and found[1] == size else size
    return TrainingWorld(rank, size, original, mesh if is_of(mesh or {}, size) else None)


def accumulate(model: Any = None, mesh: Any = None) -> Iterator[Any]:
    """Yield the shares of this rank, one after the other; call ``backward`` once for each.

    ::

        for share in robust_slurm.accumulate(model):
            loss = loss_of(model(batch(step, share)))
            (loss * robust_slurm.world().scale).backward()
        optimizer.step()

    ``model``: a DistributedDataParallel, whose gradients are then summed up over the ranks at the
    last share only; or one of ``fully_shard``, whose passes need all ranks: if another rank has one
    share more, a last one is None, for a pass with any batch, and ``scale`` is 0. If a loader gives
    its last batch again for that pass, and its loss is not scaled, the batch would count twice:
    RuntimeError. ``mesh``: see ``world``.
    """
    _now.pass_of_others = None  # of a loop that an exception has ended, and whose frame is kept
    whole = world(mesh)
    shares = whole.shares
    if hasattr(model, "set_requires_gradient_sync"):
        yield from shares
        if len(shares) < -(-whole.share_count * whole.replica_ranks // whole.size):
            here = _now.pass_of_others = _Pass()
            try:
                yield None
            finally:
                if _now.pass_of_others is here:
                    _now.pass_of_others = None
            if here.repeats and not here.scaled:
                raise RuntimeError(
                    "accumulate: the batch of a pass without a share would count: multiply each "
                    "loss by robust_slurm.world().scale, read in each pass"
                )
        return
    quiet = getattr(model, "no_sync", nullcontext)
    for share in shares[:-1]:
        with quiet():
            yield share
    yield shares[-1]


def repeats() -> bool:
    """Note that a loader gives its last batch again, if ``accumulate`` is at a pass without a share
    of this rank's own; return that."""
    if (at := _now.pass_of_others) is not None:
        at.repeats = True
    return at is not None


def _sizes(mesh: Any) -> dict[str, int]:
    """Return a mesh, or torch's DeviceMesh, as name -> size."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        return dict(mesh or {})
    return dict(zip(names, mesh.shape))  # noqa: B905 - Python 3.9 has no strict


def _number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return None
