"""Replace the nodes that have left: by spares first, then by standby nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Node
from srun_wrapper.job.topology import Topology
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.resize.resizing import Resizing
from srun_wrapper.recover.standby.nodes import StandbyNodes


class Replacement:
    """Fills the vacant places."""

    def __init__(
        self,
        members: Membership,
        standby: StandbyNodes,
        topology: Topology,
        reports: Reports,
        over: Callable[[], bool],
        resizing: Resizing,
    ) -> None:
        """``over``: True after a new failure or if the job is ending: nothing more is requested."""
        self._resizing = resizing
        self._members = members
        self._world = members.world
        self._standby = standby
        self._topology = topology
        self._reports = reports
        self._over = over
        self._came: set[str] = set()  # nodes that took a place since all ranks last stepped

    def just_joined(self) -> set[str]:
        """Return the nodes that took a place since all ranks last stepped, and did not step.

        Where steps of some ranks alone are seen (rank 0's output), these count for all.
        """
        world = self._world
        ranks = (*world.by_rank.values(), *world.inner.values())
        seen = [rank for rank in world.by_rank.values() if rank.rank in world.steppers]
        all_stepped = bool(seen) and all(rank.beats for rank in seen)
        return self._came - {rank.node.name for rank in ranks if rank.beats or all_stepped}

    def joined(self) -> None:
        """Note that the ranks of all nodes run: none of them is new any more."""
        self._came.clear()

    async def fill(self, incident: Incident) -> bool:
        """Put a node in every vacant place. False: not enough came in time, or a new failure.

        Spares of the allocation are used before standby nodes, even one that was in doubt and
        answers while standby nodes are awaited. Where fewer nodes join than are wanted, the nodes
        that the plan names first are replaced. With a plan to shrink, places that no spare takes
        are given up. A world that lacks nodes gets those that are idle.
        """
        self._came = self.just_joined()
        first = list(self._world.places)
        if incident.plan and incident.plan.action == "shrink":
            lacking = self._fill_with_spares(incident)
            done = not lacking or self._resizing.shrink(incident)
        else:
            done = await self._fill(incident)
        if done and not self._over():
            before = list(self._world.places)
            self._resizing.fill(incident)
            came = [n.name for n in self._world.places if n not in before]
            gone = [n.name for n in first if n not in self._world.places]
            self._came.update(came)
            incident.swaps += zip(gone, came, strict=False)  # given up, and filled all the same
        return done

    async def _fill(self, incident: Incident) -> bool:
        world = self._world
        while wanted := self._fill_with_spares(incident):
            came = await self._standby.take(
                {place: (len(world.ranks[place]), world.places[place].name) for place in wanted},
                vacant=lambda place: world.places[place].gone,
                enough=lambda: any(self._fits(spare, wanted) for spare in self._members.spares()),
                fewer=not self._resizing.without(self._members.vacant()),
            )
            for place, node in self._by_need(wanted, came).items():
                self._take_place(place, node, incident)
            self._reports.report_unfit(self._standby.to_report(bool(came)), incident)
            back = any(self._fits(spare, wanted) for spare in self._members.spares())
            if not back or self._over():
                return not self._members.vacant()
        return True

    def _fill_with_spares(self, incident: Incident) -> list[int]:
        """Give the vacant places to spares; returns those for which there is none."""
        world = self._world
        vacant = [i for i, n in enumerate(world.places) if n.gone]
        first = {name: i for i, name in enumerate(incident.plan.replace if incident.plan else ())}
        vacant.sort(key=lambda place: first.get(world.places[place].name, -1))
        spares = {n.name: n for n in self._members.spares() if n.slots >= 1}
        best = self._topology.prefer([world.places[p].name for p in vacant], list(spares))
        wanted: list[int] = []
        for place in vacant:
            names = [best.get(world.places[place].name, ""), *spares]
            fits = (n for n in names if n in spares and self._fits(spares[n], [place]))
            name = next(fits, "")
            if not name:
                wanted.append(place)
                continue
            self._take_place(place, spares.pop(name), incident)
        return wanted

    def _by_need(self, wanted: Sequence[int], came: Mapping[int, Node]) -> dict[int, Node]:
        """Give the nodes that came to the places that need them most; ``wanted``: these first."""
        if len(came) == len(wanted):
            return dict(came)
        found: dict[int, Node] = {}
        free = list(came.values())
        for place in wanted:
            node = next((node for node in free if self._fits(node, [place])), None)
            if node is not None:
                found[place] = node
                free.remove(node)
        return found

    def _fits(self, spare: Node, places: Sequence[int]) -> bool:
        """True if one of the places is vacant and the spare has the slots for its ranks."""
        world = self._world
        return any(world.places[p].gone and spare.slots >= len(world.ranks[p]) for p in places)

    async def reinforce(self, count: int, slots: int) -> list[Node]:
        """Return nodes with so many slots, for places that the allocation has no nodes for."""
        came = await self._standby.take(dict.fromkeys(range(count), (slots, "")))
        self._came.update(node.name for node in came.values())
        return [came[place] for place in sorted(came)]

    def exchange(self, name: str) -> str:
        """Have a node exchange its place with another that fits; return that one, or "".

        The next one is taken, if possible of those that have not just joined.
        """
        places, ranks = list(self._world.places), self._world.ranks
        own = next((i for i, node in enumerate(places) if node.name == name), None)
        if own is None or not self._topology.movable():
            return ""
        others = [(own + step) % len(places) for step in range(1, len(places))]
        new = self.just_joined()
        for other in sorted(others, key=lambda other: places[other].name in new):
            counts = len(ranks[own]), len(ranks[other])
            if counts[0] == counts[1] and not places[other].gone:
                places[own], places[other] = places[other], places[own]
                self._members.arrange(places)
                return places[own].name
        return ""

    async def arrange(self) -> None:
        """Move nodes among the places so that neighbours in the network stay together."""
        await self._topology.arrange()

    def _take_place(self, place: int, node: Node, incident: Incident) -> None:
        old = self._world.places[place]
        self._members.take_place(place, node)
        self._came.add(node.name)
        incident.swaps.append((old.name, node.name))
