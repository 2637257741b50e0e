"""Assign nodes to places so that the job's groups spread least over the network.

``standby.placement.choose`` (one of the standbys for a lost node) and ``standby.placement.place``
(all nodes, with --robust-place) decide. This module gives them the network as Slurm knows it, and
the mesh that the training's Checkpointer or the user has named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import prod

from robust_slurm.checkpoint.planning.topology import leaves
from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from robust_slurm.text import counted
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.command.srun_options import UsageError
from srun_wrapper.command.steps import Launch
from srun_wrapper.command.torchrun import sorts_nodes, starts_ranks
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.run_in_thread import run_in_thread
from standby.placement.choose import UNKNOWN, choose
from standby.placement.place import order
from standby.placement.spread import Groups, Layout, Spread, check_alpha, groups, parse_mesh, spread
from standby.placement.topology import minipods

PATIENCE = 10.0  # s for Slurm to return its topology; likewise to compute an order


def check(mesh: str, alpha: float) -> None:
    """Raise UsageError for settings that cannot be used."""
    try:
        if mesh:
            parse_mesh(mesh)
    except ValueError as err:
        raise UsageError(f"--robust-mesh={err}") from None
    try:
        check_alpha(alpha)
    except ValueError as err:
        raise UsageError(f"--robust-place-alpha: {err}") from None


def layout(
    mesh: Mapping[str, int], ranks: Sequence[Sequence[int]], command: Sequence[str]
) -> Layout:
    """Return the ranks of each place: the slots', or those that a torchrun in each will start."""
    world = prod(mesh.values())
    one_each = all(len(own) == 1 for own in ranks)
    if mesh and one_each and starts_ranks(command) and world % len(ranks) == 0:
        return world // len(ranks)
    return ranks


class Topology:
    """Knows how nodes are connected. If that is unknown, no node is preferred to another."""

    def __init__(
        self,
        members: Membership,
        config: Config,
        launch: Launch,
        journal: Journal,
        read: Callable[[], str],
        trained: Callable[[], Mapping[str, int]],
    ) -> None:
        """``read``: return Slurm's topology; ``trained``: the mesh that the ranks named, or {}."""
        self._members = members
        self._world = members.world
        self._config = config
        self._command = launch.command.command
        self._launch = launch
        self._journal = journal
        self._read = read
        self._trained = trained
        self._minipods: dict[str, str] = {}
        self.leaf_of: Mapping[str, str] = {}  # node -> its leaf switch
        self._unknown = "Slurm has no topology (topology.conf)"
        self._learning: asyncio.Task[None] | None = None

    def learn(self) -> None:
        """Begin to read the topology, beside the start of the job."""
        self._learning = asyncio.create_task(self._learn())

    async def _learn(self) -> None:
        try:
            text = await run_in_thread(self._read, PATIENCE)
            self._minipods, self.leaf_of = minipods(text), leaves(text)
        except (SlurmError, OSError, ValueError, TimeoutError) as err:
            self._unknown = f"no topology: {err or f'no answer in {PATIENCE:g} s'}"
            self._journal.news(self._unknown)
        except Exception as err:  # noqa: BLE001 - replicas and the first order need none
            self._unknown = f"no topology: internal error: {type(err).__name__}: {err}"
            self._journal.news(self._unknown)

    async def leaves(self) -> Mapping[str, str]:
        """Return the leaf switch of each node; {} if that is not known."""
        if self._learning is not None:
            await self._learning
        return self.leaf_of

    def pod(self, name: str) -> str:
        """Return a node's location in the network; "" for all nodes if it is not known."""
        return self._minipods.get(name, "")

    def prefer(self, lost: Sequence[str], candidates: Sequence[str]) -> dict[str, str]:
        """Return the best candidate for each lost node; {} if none is better than another."""
        world, mesh = self._world, self.mesh()
        places = [node.name for node in world.places]
        lost = [name for name in lost if name in places]
        if not lost or len({self._minipods.get(name) for name in candidates}) < 2:
            return {}
        ranks, alpha = self.ranks_of_places(mesh), self._config.place_alpha
        try:
            return choose(lost, candidates, places, mesh, ranks, self._minipods, alpha)
        except ValueError as err:
            self._journal.news(f"no choice by topology: {err}")
            return {}

    def mesh(self) -> dict[str, int]:
        """Return the mesh that the ranks or the user named; {} if nobody did."""
        named = self._config.mesh
        return dict(self._trained()) or (parse_mesh(named) if named else {})

    # -- all places

    async def arrange_first(self) -> None:
        """Order all nodes, spares included, before the first epoch."""
        if not self._config.place:
            return
        await self.leaves()
        world, mesh = self._world, self.mesh()
        size, ranks = prod(mesh.values()), sum(map(len, world.ranks))
        if mesh and size != ranks and not isinstance(self.ranks_of_places(mesh), int):
            say(
                f"--robust-mesh={self._config.mesh} describes {counted(size, 'rank')}, the job "
                f"has {ranks}"
            )
        elif not self._minipods:
            say(f"--robust-place: {self._unknown}: nodes stay in Slurm's order")
        elif self._sorted_by_torchrun():
            say("--robust-place: this torchrun numbers its nodes itself: use --rdzv-backend=static")
        else:
            spares = sorted(self._members.spares(), key=lambda node: node.key[2])
            await self._arrange(spares, settled=False)

    async def arrange(self) -> None:
        """Order the nodes after a swap, only for a better spread: snapshots stay on their nodes."""
        if self._config.place and self._minipods and not self._sorted_by_torchrun():
            await self._arrange([], settled=True)

    def ranks_of_places(self, mesh: Mapping[str, int]) -> Layout:
        """Return the ranks of each place; see ``layout``."""
        return layout(mesh, self._world.ranks, self._command)

    def movable(self) -> bool:
        """True if a node's ranks can be given to another node without losing their input."""
        own = self._launch.feed in (StdinFeed.ONE, StdinFeed.OWN)
        return not own and not self._sorted_by_torchrun()

    def _sorted_by_torchrun(self) -> bool:
        return sorts_nodes(self._command, self._launch.env)

    async def _arrange(self, spares: Sequence[Node], settled: bool) -> None:
        world, mesh = self._world, self.mesh()
        known = {node.name: node for node in (*world.places, *spares)}
        ranks, alpha = self.ranks_of_places(mesh), self._config.place_alpha
        places, pods = len(world.places), self._minipods

        def found() -> tuple[list[str], Groups]:
            names = order(list(known), mesh, ranks, pods, alpha, settled=settled)
            return names, groups(mesh, ranks, places)

        try:
            names, job = await run_in_thread(found, PATIENCE)
        except (ValueError, TimeoutError) as err:
            say(f"--robust-place: nodes stay where they are: {err or 'no answer in time'}")
            return
        chosen = [known[name] for name in names[:places]]
        if any(node.gone for node in chosen):
            return  # lost meanwhile: the next recovery replaces it
        if any(n.slots < len(own) for n, own in zip(chosen, world.ranks, strict=True)):
            say("--robust-place: nodes stay where they are: they have different numbers of tasks")
            return
        before, after = (self._spread(job, nodes) for nodes in (world.places, chosen))
        switches = f"switches per DP group: at most {after.dp}, per PP group: {after.pp}"
        if chosen != world.places:
            self._members.arrange(chosen)
            self._journal.event("placed", nodes=[node.name for node in chosen])
            say(f"nodes ordered by the network; {switches} (were {before.dp} and {before.pp})")
        elif not settled:
            say(f"--robust-place: Slurm's node order is kept, no better one was found; {switches}")

    def _spread(self, job: Groups, nodes: Sequence[Node]) -> Spread:
        return spread(job, [self._minipods.get(node.name, UNKNOWN) for node in nodes])

    def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
