"""Train on with fewer nodes, and with all again: carried out on the job's nodes and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from robust_slurm.resizing.change import Resize, fewer, more
from robust_slurm.resizing.dimensions import COPIES, DATA, PIPELINE
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.command.input_rules import StdinFeed
from srun_wrapper.command.steps import Launch
from srun_wrapper.command.torchrun import numbers_nodes
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import OFF
from srun_wrapper.job.model import AgentKey, Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState

WARM_BY = 30.0  # s for which the ranks go on without a node that still imports what they import


class Resizing:
    """Makes the world smaller when nothing can replace a node, and larger when nodes are there."""

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        launch: Launch,
        journal: Journal,
        mesh: Callable[[], dict[str, int]],
        use: Callable[[int], None],
    ) -> None:
        """``mesh``: as the ranks or the user named it, or {}; ``use``: note that the standby node
        of a request has a place."""
        self._use = use
        self._state = state
        self._world = state.world
        self._enrolments = enrolments
        self._launch = launch
        self._journal = journal
        self._mesh = mesh
        self._full: list[tuple[int, ...]] = []  # ranks of each place, as the job began
        self._trained: list[tuple[int, ...]] = []  # as _full: those that a torchrun starts
        self._stages: tuple[tuple[int, ...], ...] = ()  # of these ranks, see Enrolments.stages
        self._home: list[int] = []  # the place in _full of each place of the present world
        self._lacking: list[tuple[int, ...]] = []  # places of _full without a node, in sets
        self._idle_since: dict[AgentKey, float] = {}  # since when a node has been idle
        self._tried = 0  # epoch of another size than the one before it, until it makes a step

    @property
    def wanted(self) -> list[int]:
        """Numbers of ranks of the places that lack a node."""
        return [len(self._full[place]) for places in self._lacking for place in places]

    @property
    def failed(self) -> bool:
        """True if the ranks have made no step since the world's size has changed."""
        if self._world.epoch < self._tried:
            return False
        self.note_steps()
        return self._tried > 0

    def note_steps(self) -> None:
        """Note that ranks make steps in this world; called while they run."""
        if self._world.epoch >= self._tried and self._state.progress.beats:
            self._tried = 0

    def unfit(self) -> str:
        """Return why the job could not go on without its last node; "" if it could."""
        return self.without([self._world.places[-1].name])

    # -- fewer

    def without(self, names: Sequence[str]) -> str:
        """Return why the job cannot go on without these nodes; "" if it can."""
        try:
            self._smaller([p for p, n in enumerate(self._world.places) if n.name in names])
        except ValueError as err:
            return str(err)
        return ""

    def shrink(self, incident: Incident) -> bool:
        """Give up the vacant places. False: the job cannot go on without them."""
        vacant = [place for place, node in enumerate(self._world.places) if node.gone]
        if not vacant:
            return True
        try:
            slots, trained = self._smaller(vacant)
        except ValueError as err:
            self._journal.news(f"no smaller world: {err}")
            return False
        if not self._full:
            self._full, self._home = list(self._world.ranks), list(range(len(self._world.ranks)))
            self._trained = self._ranks()
        if not self._lacking:  # the script may have been updated since they lacked one
            self._stages = self._enrolments.stages()
        self._lacking += [tuple(self._home[p] for p in places) for places in slots.left]
        self._home = [self._home[place] for place in slots.places]
        self._carry(incident, [self._world.places[p] for p in slots.places], slots, trained)
        return True

    def _smaller(self, vacant: Sequence[int]) -> tuple[Resize, Resize]:
        """Return the change for the task slots and for the training's ranks. Raises ValueError."""
        least = self._state.config.min_nodes
        if not least:
            raise ValueError(OFF)
        if numbers_nodes(self._launch.command.command, self._launch.env):
            raise ValueError("this torchrun numbers its nodes itself: use --rdzv-backend=static")
        if self._launch.feed in (StdinFeed.ONE, StdinFeed.OWN):
            raise ValueError("its ranks read input of their own")
        ranks, slots = self._ranks(), self._world.ranks
        if len(ranks) != len(slots):
            raise ValueError("some nodes have no rank with a Checkpointer")
        groups = self._groups(sum(map(len, ranks)))
        if self._lacking and not self._same_stages():
            raise ValueError("the ranks name another mesh than before the world became smaller")
        trained = fewer(ranks, vacant, groups, least)
        places = [place for place in range(len(slots)) if place not in trained.places]
        of_slots = [range(sum(map(len, slots)))] if len(slots) > 1 else []
        return replace(fewer(slots, places, of_slots, least), left=trained.left), trained

    def _ranks(self) -> list[tuple[int, ...]]:
        """Return the training's ranks of each place: of a torchrun more than the task slots."""
        return self._enrolments.places() or list(self._world.ranks)

    def _groups(self, world: int) -> list[Sequence[int]]:
        """Return the groups of ranks that are known to hold the same state. Raises ValueError."""
        mesh, known = self._mesh(), self._enrolments
        many = {name: size for name, size in mesh.items() if size > 1}
        lengths, shards = known.cut()
        data = DATA if lengths or shards else COPIES | PIPELINE
        if not data.issuperset(many):
            also = "" if lengths or shards else " and pipelines"
            raise ValueError(f"the mesh has more than data parallelism{also} ({', '.join(many)})")
        if not PIPELINE.isdisjoint(many) and not known.stages():
            raise ValueError("the ranks of a pipeline need a Checkpointer that gets the mesh")
        if known.ranks:
            if known.places() is None or sum(map(len, known.places() or ())) != world:
                raise ValueError("some ranks have no Checkpointer")
            if why := known.fixed():
                raise ValueError(why)
            groups = known.groups()
            if stages := known.stages():
                return self._replicated(groups, stages)
            if lengths:  # any may leave: its blocks are cut anew among the others
                return [range(world)]
            if shards and len(groups) != shards:
                raise ValueError("the replicas of the model are not known to hold the same state")
            if shards and max(map(len, groups)) < 2:
                raise ValueError("only one replica of the model is left")
            if not shards and len(groups) != 1:
                raise ValueError("the ranks do not all hold the same state")
            return list(groups)
        if many:
            if (named := prod(many.values())) != (sum(map(len, self._trained)) or world):
                raise ValueError(f"the mesh has {named} ranks, {world} are known")
            return [range(world)]
        raise ValueError(
            "nothing says that all ranks hold the same: name a mesh (--robust-mesh=dp=N), or use "
            "a Checkpointer"
        )

    def _replicated(
        self, groups: Sequence[tuple[int, ...]], stages: Sequence[tuple[int, ...]]
    ) -> list[Sequence[int]]:
        """Return the ranks of each stage, if all of these hold the same. Raises ValueError."""
        if max(map(len, stages)) < 2:
            raise ValueError("there is only one replica of the model")
        if sorted(groups) != sorted(stages):
            raise ValueError("the ranks of a pipeline stage are not known to hold the same state")
        return list(stages)

    # -- more

    def fill(self, incident: Incident) -> bool:
        """Give nodes that are idle in the job the places that lack one. False: there are none.

        While ranks are down, any idle node is used, those that would start warm first. Running
        ranks are stopped only for nodes that are prepared.
        """
        if not self.ready:
            return False
        known = self._idle_nodes()
        free = self._prepared(known, time.monotonic())
        if incident.diagnosis.symptom != "grow":
            free += [node for node in known if node not in free]
        elif not self._suffice(free):
            return False  # the prepared node has gone since the ranks were asked to stand
        come: dict[int, Node] = {}
        for places in list(self._lacking):
            fit = self._fitting(places, [n for n in free if n not in come.values()])
            if fit:
                come |= fit
                self._lacking.remove(places)
        world = self._world
        slots = more(world.ranks, self._full, self._home, come)
        trained = more(self._ranks(), self._trained, self._home, come, self._stages)
        self._home = sorted([*self._home, *come])
        for node in come.values():
            self._use(node.standby_request)
        before = list(world.places)
        at = zip(self._home, slots.places, strict=True)
        nodes = [come[home] if old < 0 else before[old] for home, old in at]
        self._carry(incident, nodes, slots, trained)
        return True

    @property
    def ready(self) -> bool:
        """True if idle nodes could take places that lack one."""
        return self._suffice(self._idle_nodes())

    def prepared(self, now: float) -> bool:
        """True if idle nodes that would start warm could; called while the ranks run.

        A node for which the ranks have gone on without it for ``WARM_BY`` counts as well, and so
        does any where none can be warm.
        """
        return bool(self._lacking) and self._suffice(self._prepared(self._idle_nodes(), now))

    def _suffice(self, free: Sequence[Node]) -> bool:
        if not self._lacking:
            return False
        known = [len(own) for own in self._ranks()]
        if known != [len(self._trained[place]) for place in self._home] or not self._same_stages():
            return False  # the script has another world than it had
        return any(self._fitting(places, free) for places in self._lacking)

    def _same_stages(self) -> bool:
        try:
            return len(self._enrolments.stages()) == len(self._stages)
        except ValueError:
            return False

    def _idle_nodes(self) -> list[Node]:
        nodes = self._state.nodes.values()
        return [n for n in nodes if n.role is Role.SPARE and n.connection and not n.lacks]

    def _prepared(self, idle: Sequence[Node], now: float) -> list[Node]:
        """Return those of the idle nodes for whose imports nobody has to wait."""
        before = self._idle_since
        self._idle_since = {node.key: before.get(node.key, now) for node in idle}
        if not self._state.config.warm or not self._state.learnt:
            return list(idle)
        least = min((len(self._trained[p]) for places in self._lacking for p in places), default=0)
        return [
            node
            for node in idle
            if sum(node.warm.values()) >= least  # torchrun's ranks are those of one slot
            or 0 in node.warm.values()
            or now - self._idle_since[node.key] >= WARM_BY
        ]

    def _fitting(self, places: Sequence[int], free: Sequence[Node]) -> dict[int, Node]:
        """Return a node for each of the places; {} if one has none."""
        found: dict[int, Node] = {}
        for place in sorted(places, key=lambda p: -len(self._full[p])):
            fits = (n for n in free if n not in found.values())
            node = next((n for n in fits if n.slots >= len(self._full[place])), None)
            if node is None:
                return {}
            found[place] = node
        return found

    # -- either

    def _carry(
        self, incident: Incident, nodes: Sequence[Node], slots: Resize, trained: Resize
    ) -> None:
        state, original = self._state, sum(map(len, self._trained))
        self._world.replica_ranks = len(self._stages) or 1
        self._enrolments.resize(trained, original, nodes)
        state.members.resize(nodes, slots)
        resized = (original, trained.new) if trained.new != original else None
        self._world.resized = resized
        state.pace.tempo.forget()
        self._tried = self._world.epoch + 1
        before = incident.resized[0] if incident.resized else trained.old
        incident.resized = (before, trained.new) if before != trained.new else None
        self._journal.event(
            "resized", old=trained.old, new=trained.new, nodes=[n.name for n in nodes]
        )
