"""The closer look at a job that makes no step, after the ranks have been located.

The flight recorders of all ranks are read; a few processes are looked at in depth. The report of a
hang does not wait for this look: the findings until then are part of its evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from srun_wrapper.job.model import Node, World
from srun_wrapper.job.state import JobState
from srun_wrapper.locate.closer_story import CloserView, of_processes, of_recorders
from srun_wrapper.locate.collectives import ALL_IN, MISMATCH, OpenCollective, findings, held
from srun_wrapper.locate.locate import Located
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.story import odd_loaders
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser

QUICK = 3.0  # s for all slots to read recorders
DEEP = 10.0  # s for few slots to read native stacks
RANKS = 2  # that are looked at in depth
Replies = Sequence[tuple[Node, LookedCloser]]


@dataclass(frozen=True, slots=True)
class CloserFindings:
    """The result of a closer look."""

    found: tuple[OpenCollective, ...] = ()
    recorders: tuple[str, ...] = ()  # a line for each of these
    processes: tuple[str, ...] = ()
    held: Mapping[int, float] = field(default_factory=dict)
    """Rank → s that it has been in one collective."""

    def lines(self) -> tuple[str, ...]:
        """Return all lines."""
        return self.recorders + self.processes

    def news(self) -> tuple[str, ...]:
        """Return the lines to be printed; the others are evidence if the job proves to hang."""
        pairs = zip(self.found, self.recorders, strict=True)
        return tuple(line for finding, line in pairs if finding.kind != ALL_IN)

    def mismatch(self) -> Located | None:
        """Return the ranks whose collective differs from the others', None if there are none: then
        their program differs, and no node is suspect."""
        for finding in self.found:
            if finding.kind == MISMATCH:
                return Located(finding.ranks, (), finding.text)
        return None


def in_depth(views: Sequence[RankView], located: Located) -> dict[tuple[str, int], tuple[int, str]]:
    """Map node and pid of the processes to be looked at in depth to their rank and what they are:
    of the ranks for which the others wait, and the data-loader workers that those wait for."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    odd = [view for view in views if view.rank in located.ranks and view.pid and view.state != "T"]
    for view in odd[:RANKS]:
        found[view.node, view.pid] = view.rank, ""
        for pid, _ in odd_loaders(view, views)[:1]:
            found[view.node, pid] = view.rank, f"data-loader worker {pid}"
    return found


async def read_recorders(
    state: JobState, active: Sequence[Node], views: Sequence[RankView]
) -> CloserFindings:
    """Read the flight recorders of all ranks, and what the kernel shows of those without Python."""
    replies = await _ask(state, [(node, ()) for node in active], QUICK)
    recorded = [one for _, reply in replies for one in reply.recorded]
    found = findings(recorded, {view.rank for view in views}) if recorded else ()
    lines = _lines(state.world, replies, {})
    return CloserFindings(found, of_recorders(found), lines, held(recorded))


async def look_deeper(
    state: JobState, active: Sequence[Node], views: Sequence[RankView], located: Located
) -> tuple[str, ...]:
    """Return lines about the processes for which the others wait: native stacks, the kernel."""
    named = in_depth(views, located)
    pids = [(node, tuple(pid for at, pid in named if at == node.name)) for node in active]
    asked = [(node, those) for node, those in pids if those]
    return _lines(state.world, await _ask(state, asked, DEEP), named)


async def _ask(
    state: JobState, pids: Sequence[tuple[Node, tuple[int, ...]]], seconds: float
) -> Replies:
    """Ask all slots of these nodes; return the answers that come in time."""
    world, epoch = state.world, state.world.epoch
    wanted = {(node.key, local) for node, _ in pids for local in range(_slots(world, node))}
    with state.bus.ask(
        LookedCloser,
        lambda token: [(node, LookCloser(token, those)) for node, those in pids],
        repeat=False,
    ) as asked:
        await asked.until(lambda: asked.answered(wanted) or world.epoch != epoch, seconds)
    return asked.replies


def _lines(
    world: World, replies: Replies, named: Mapping[tuple[str, int], tuple[int, str]]
) -> tuple[str, ...]:
    views = [view for node, reply in replies for view in _views(world, node, reply, named)]
    return of_processes(sorted(views, key=lambda view: (view.rank, view.what)))


def _slots(world: World, node: Node) -> int:
    place = world.place_of(node)
    return len(world.ranks[place]) if place is not None else 0


def _views(
    world: World, node: Node, reply: LookedCloser, named: Mapping[tuple[str, int], tuple[int, str]]
) -> list[CloserView]:
    slot = world.rank_at(node, reply.local)
    found = []
    for each in reply.processes:
        own = (slot.rank, "") if slot is not None else (-1, "")
        rank, what = named.get((node.name, each.pid), own)
        if rank >= 0:
            found.append(
                CloserView(
                    rank, node.name, what, each.name, each.kernel, each.native, each.failed,
                    each.python,
                )
            )  # fmt: skip
    return found
