"""The closer look at a job that makes no step, after the ranks have been located.

All ranks give their flight recorders; few processes are looked at in depth. It decides nothing and
nobody waits for it: what it has found when a hang is reported goes with the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from srun_wrapper.job.bus import Bus
from srun_wrapper.job.model import Node, World
from srun_wrapper.job.state import JobState
from srun_wrapper.locate.closer_story import CloserView, of_processes, of_recorders
from srun_wrapper.locate.collectives import ALL_IN, MISMATCH, Finding, findings
from srun_wrapper.locate.locate import Located
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.story import odd_loaders
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser

REPLY = 6.0  # s for all slots
RANKS = 2  # that are looked at in depth


@dataclass(frozen=True, slots=True)
class CloserFindings:
    """The result of a closer look."""

    found: tuple[Finding, ...] = ()
    recorders: tuple[str, ...] = ()  # a line for each of these
    processes: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return all lines."""
        return self.recorders + self.processes

    def news(self, clear: bool) -> tuple[str, ...]:
        """Return the lines to be printed; the others are evidence if the job proves to hang.

        ``clear``: the ranks for which the others wait are located.
        """
        pairs = zip(self.found, self.recorders, strict=True)
        told = tuple(line for finding, line in pairs if finding.kind != ALL_IN)
        return told + (self.processes if clear else ())

    def mismatch(self) -> Located | None:
        """Return the ranks whose collective differs, if that is why the job waits: their program
        does, and no node is suspect."""
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


async def look_closer(
    state: JobState, bus: Bus, active: Sequence[Node], views: Sequence[RankView], located: Located
) -> CloserFindings:
    """Ask the slots of these nodes, and return what they have answered in time."""
    world, epoch = state.world, state.world.epoch
    named = in_depth(views, located) if located.clear else {}
    wanted = {(node.key, local) for node in active for local in range(_slots(world, node))}
    with bus.ask(
        LookedCloser,
        lambda token: [
            (node, LookCloser(token, tuple(pid for at, pid in named if at == node.name)))
            for node in active
        ],
        repeat=False,
    ) as asked:
        await asked.until(lambda: asked.answered(wanted) or world.epoch != epoch, REPLY)
    recorded = [one for _, reply in asked.replies for one in reply.recorded]
    found = findings(recorded, {view.rank for view in views}) if recorded else ()
    seen = [view for node, reply in asked.replies for view in _views(world, node, reply, named)]
    seen.sort(key=lambda view: (view.rank, view.what))
    return CloserFindings(found, of_recorders(found), of_processes(seen))


def _slots(world: World, node: Node) -> int:
    place = world.place_of(node)
    return len(world.ranks[place]) if place is not None else 0


def _views(
    world: World, node: Node, reply: LookedCloser, named: dict[tuple[str, int], tuple[int, str]]
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
