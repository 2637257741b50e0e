"""The ranks as the nodes have described them in an inspection, for ``locate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from robust_slurm.text import one_line
from srun_wrapper.job.model import Node, World
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.protocol.looking_messages import LAUNCHER, LOADER, RANK, Look
from srun_wrapper.protocol.messages import SlotActivity

MOST_LOADERS = 64  # of a rank


def rank_views(
    world: World, replies: Iterable[tuple[Node, Sequence[SlotActivity]]]
) -> list[RankView]:
    """Return all ranks that the nodes have described, torchrun's under their own numbers."""
    found: dict[int, RankView] = {}
    for node, samples in replies:
        for sample in samples:
            for view in _of_slot(world, node, sample):
                found.setdefault(view.rank, view)
    return [found[rank] for rank in sorted(found)]


def _of_slot(world: World, node: Node, sample: SlotActivity) -> list[RankView]:
    slot = world.rank_at(node, sample.local)
    if slot is None or slot.rank < 0 or slot.exit is not None or not sample.state:
        return []
    ranks = [look for look in sample.looks if look.role == RANK]
    inner = len(ranks) > 1 or any(look.role == LAUNCHER for look in sample.looks)
    if not inner:
        only = ranks[0] if ranks else Look(0, RANK, sample.state, stacks=())
        state = "T" if sample.state == "T" else only.state
        return [_view(slot.rank, node, only, state, slot.step, sample)]
    return [
        _view(look.rank, node, look, look.state, _step(world, node, look.local), sample)
        for look in ranks
        if look.rank >= 0
    ]


def _step(world: World, node: Node, local: int) -> int | None:
    """Return the last step of the rank with that LOCAL_RANK on the node."""
    place = world.place_of(node)
    if place is None:
        return None
    slots = world.ranks[place]
    if 0 <= local < len(slots):
        rank = world.by_rank.get(slots[local])
    else:
        rank = world.inner.get((place, local))
    return rank.step if rank is not None else None


def _view(
    number: int, node: Node, look: Look, state: str, step: int | None, sample: SlotActivity
) -> RankView:
    loaders = [o for o in sample.looks if o.role == LOADER and o.rank == look.rank][:MOST_LOADERS]
    stacks = tuple((other.pid, other.main()) for other in loaders)
    waits = [
        f"its data-loader worker {other.pid} {other.kernel}" for other in loaders if other.kernel
    ]
    kernel = "; ".join(filter(None, (look.kernel, *waits[:1])))
    failed = one_line(look.failed)
    return RankView(number, node.name, look.main(), state, step, stacks, failed, look.mount, kernel)
