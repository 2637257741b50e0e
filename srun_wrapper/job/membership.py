"""The only writer of the job's nodes: their roles and places, and the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from robust_slurm.resizing.change import Resize
from srun_wrapper.job.model import MOVES, AgentKey, Node, Role, World

_log = logging.getLogger("robust-srun.nodes")


class Membership:
    """Owns the nodes and the world; everybody else reads them."""

    strict = False  # whether an impossible move of a node raises: in tests

    def __init__(self, on_slip: Callable[[str], None]) -> None:
        """``on_slip``: gets the text of an impossible move, which is an internal error."""
        self._on_slip = on_slip
        self.nodes: dict[AgentKey, Node] = {}
        self.world = World(0, [], [])
        self.stopping_epoch = 0  # newest epoch whose ranks were told to stop

    # -- views

    def live(self) -> list[Node]:
        return [n for n in self.nodes.values() if not n.gone]

    def spares(self) -> list[Node]:
        """Idle nodes of the allocation that answer and lack nothing, the freshest word first."""
        ready = [
            n
            for n in self.nodes.values()
            if n.role is Role.SPARE and n.connection and not n.standby_request and not n.lacks
        ]
        return sorted(ready, key=lambda n: -n.last_word)

    def vacant(self) -> tuple[str, ...]:
        return tuple(n.name for n in self.world.places if n.gone)

    def named(self, name: str) -> Node | None:
        """Return the node of that name that is in the job now, else the last that was."""
        matches = [n for n in self.nodes.values() if n.name == name]
        return next((n for n in matches if not n.gone), matches[-1] if matches else None)

    # -- roles

    def join(self, node: Node) -> None:
        """Add a node that has reported for the first time."""
        self.nodes[node.key] = node

    def move(self, node: Node, role: Role) -> None:
        """Give a node another part in the job.

        An impossible move is an internal error: it is reported and refused, and raises in tests.
        """
        if role in MOVES[node.role]:
            _log.info("%s: %s -> %s", node.name, node.role.value, role.value)
            node.role = role
            return
        text = f"internal error: {node.name} cannot become {role.value}: it is {node.role.value}"
        self._on_slip(text)
        if self.strict:
            raise AssertionError(text)

    # -- places

    def lay_out(self, places: Sequence[Node], ranks: Sequence[tuple[int, ...]]) -> None:
        """Lay out the world: these nodes with these ranks each, before its first epoch."""
        self.world.epoch = 0
        self.world.places[:], self.world.ranks[:] = places, ranks

    def arrange(self, places: Sequence[Node]) -> None:
        """Order the nodes anew, from the next epoch on; roles stay as they are."""
        self.world.places[:] = places

    def take_place(self, place: int, node: Node) -> None:
        """Give the place to this node from the next epoch on."""
        self.world.places[place] = node
        self.move(node, Role.ACTIVE)

    def resize(self, places: Sequence[Node], change: Resize) -> None:
        """Give the world other places from the next epoch on; nodes without one become spares."""
        before = list(self.world.places)
        self.world.resize(places, change.ranks, change.origin)
        self._follow(before)

    def seat(self, places: Sequence[Node]) -> None:
        """Give all places to these nodes; those that lose theirs become spares."""
        before = list(self.world.places)
        self.arrange(places)
        self._follow(before)

    def _follow(self, before: Sequence[Node]) -> None:
        """Make nodes that have lost their place spares, and nodes that have one active."""
        places = self.world.places
        for node in before:
            if node not in places and node.role is Role.ACTIVE:
                self.move(node, Role.SPARE)
        for node in places:
            if node.role is Role.SPARE:
                self.move(node, Role.ACTIVE)

    # -- epochs

    def begin_epoch(self) -> int:
        """Open the next epoch over the present places; returns its number."""
        self.world.begin(self.world.epoch + 1)
        return self.world.epoch

    def stop_epoch(self) -> None:
        """Note that the ranks of this epoch are told to stop: their exits are no failures."""
        self.stopping_epoch = self.world.epoch
