"""Divide a job into the small worlds of a replay, and make their orders (pure).

What a replica is follows from the mesh: ranks whose data-parallel coordinates are equal. Nodes
that share one belong together, so a replica may be one node, a part of one or many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

from health.active.coordinator.replay import Layout, ReplayLayoutError, layout
from robust_slurm.resizing.dimensions import replay_can_shrink
from srun_wrapper.command.rank_env import node_env, rank_env, world_env
from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.starting import PEERS
from srun_wrapper.protocol.messages import Peer, RankStart, Start
from standby.placement.spread import Layout as RanksPerNode
from standby.placement.spread import fits, place_ranks


class WorldShape(NamedTuple):
    """Division of a job into small ones."""

    layout: Layout
    order: tuple[int, ...]
    """Place of each machine."""
    mesh: dict[str, int]
    """Mesh of a small world."""
    cyclic: bool
    """True if ranks are numbered round the nodes."""

    def places(self, group: Sequence[int]) -> tuple[int, ...]:
        """Return the places of a group's machines, in the order of their small world."""
        return tuple(self.order[machine] for machine in group)

    def ranks(self, nodes: int, slots: int) -> list[tuple[int, ...]]:
        """Return the rank numbers of each node of a small world."""
        if self.cyclic:
            return [tuple(range(at, nodes * slots, nodes)) for at in range(nodes)]
        return [tuple(range(at * slots, (at + 1) * slots)) for at in range(nodes)]


def shape(mesh: Mapping[str, int], per_place: RanksPerNode, places: int) -> WorldShape:
    """Divide a job of this mesh. ``per_place``: with torchrun's ranks.

    Raises ReplayLayoutError.
    """
    ranks = place_ranks(per_place, places)
    world = sum(map(len, ranks))
    if not fits(mesh, world):
        raise ReplayLayoutError(f"the mesh has {prod(mesh.values())} ranks, the job has {world}")
    if len({len(own) for own in ranks}) != 1:
        raise ReplayLayoutError("the nodes have different numbers of ranks")
    if not any(replay_can_shrink(name) for name in mesh):
        names = ", ".join(mesh)
        raise ReplayLayoutError(
            f"no dimension of the mesh ({names}) is data-parallel: name one of them dp…"
        )
    replicas = _replicas(mesh, ranks)
    if len({len(nodes) for nodes in replicas}) != 1:
        raise ReplayLayoutError("replicas of the model take different numbers of nodes")
    found = layout(places, len(replicas[0]))
    cyclic = len(ranks[0]) > 1 and ranks[0][1] != ranks[0][0] + 1
    order = tuple(place for nodes in replicas for place in nodes)
    return WorldShape(found, order, _smaller(mesh, found), cyclic)


def _replicas(mesh: Mapping[str, int], ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups of places that belong together, each in order."""
    root = list(range(len(ranks)))

    def find(place: int) -> int:
        while root[place] != place:
            root[place] = place = root[root[place]]
        return place

    first: dict[tuple[int, ...], int] = {}
    for place, own in enumerate(ranks):
        for rank in own:
            other = first.setdefault(_replica(mesh, rank), place)
            one, two = sorted((find(place), find(other)))
            root[two] = one
    found: dict[int, list[int]] = {}
    for place in range(len(ranks)):
        found.setdefault(find(place), []).append(place)
    return list(found.values())


def _replica(mesh: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """Return the data-parallel coordinates of a rank."""
    found = []
    for name, size in reversed(list(mesh.items())):
        rank, at = divmod(rank, size)
        if replay_can_shrink(name):
            found.append(at)
    return tuple(found)


def _smaller(mesh: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """Return the mesh of a group: as much data parallelism as its replicas have."""
    data = [name for name in mesh if replay_can_shrink(name)]
    left = prod(mesh[name] for name in data) // layout.replicas * layout.k
    small = dict(mesh)
    for name in reversed(data):  # the fastest keep what they have: shards before copies
        small[name] = gcd(left, mesh[name])
        left //= small[name]
    small[data[0]] *= left
    return small


def replay_orders(
    state: JobState,
    shape: WorldShape,
    groups: Sequence[Sequence[int]],
    steps: int,
    grace: float,
    extra: Mapping[str, str],
) -> list[tuple[Node, Start]]:
    """Open an epoch in which every group of machines is a world of its own.

    For the supervisor ranks keep their numbers and places; only their environment is another.
    Nodes in no group get no order.
    """
    epoch = state.new_epoch()
    world = state.world
    peers = tuple(
        Peer(i, n.address, n.hello.probe_port) for i, n in enumerate(world.places[:PEERS])
    )
    orders = []
    for number, group in enumerate(groups):
        places = shape.places(group)
        nodes = [world.places[place] for place in places]
        small = shape.ranks(len(places), len(world.ranks[places[0]]))
        shared = world_env(
            names=[node.name for node in nodes],
            ranks=small,
            epoch=epoch,
            master_addr=nodes[0].address,
            master_port=nodes[0].free_port,
            restart_reason="replay: which node is bad?",
            job_id=state.job_id,
            step_id=state.step_id,
        )
        shared |= extra
        shared |= {
            "ROBUST_REPLAY": "1",
            "ROBUST_REPLAY_STEPS": str(steps),
            "ROBUST_REPLAY_GROUP": str(number),
            "ROBUST_REPLAY_MESH": ",".join(f"{name}={size}" for name, size in shape.mesh.items()),
        }
        for index, (place, node) in enumerate(zip(places, nodes, strict=True)):
            own = node_env(index=index, name=node.name, ranks=small[index])
            starts = tuple(
                RankStart(local, rank, rank_env(rank=small[index][local], local=local))
                for local, rank in enumerate(world.ranks[place])
            )
            order = Start(
                epoch=epoch,
                env=shared | own,
                ranks=starts,
                grace=grace,
                index=place,
                first=False,
                nodes=len(world.places),
                master=nodes[0].address,
                port=nodes[0].free_port,
                peers=peers,
                code=state.code,
            )
            orders.append((node, order))
    return orders
