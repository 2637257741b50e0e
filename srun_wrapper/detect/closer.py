"""The closer look at a job that makes no step, after the ranks have been located.

The flight recorders of all ranks are read. The report of a hang does not wait for this look: the
findings until then are part of its evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState
from srun_wrapper.locate.collectives import ALL_IN, MISMATCH, OpenCollective, findings, held, line
from srun_wrapper.locate.locate import Located
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser

QUICK = 3.0  # s for all slots to read recorders


@dataclass(frozen=True, slots=True)
class CloserFindings:
    """The result of a closer look."""

    found: tuple[OpenCollective, ...] = ()
    held: Mapping[int, float] = field(default_factory=dict)
    """Rank → s that it has been in one collective."""

    def lines(self) -> tuple[str, ...]:
        """Return a line for each collective that is not finished."""
        return tuple(line(finding) for finding in self.found)

    def news(self) -> tuple[str, ...]:
        """Return the lines to be printed; the others are evidence if the job proves to hang."""
        return tuple(line(finding) for finding in self.found if finding.kind != ALL_IN)

    def mismatch(self) -> Located | None:
        """Return the ranks whose collective differs from the others', None if there are none: then
        their program differs, and no node is suspect."""
        for finding in self.found:
            if finding.kind == MISMATCH:
                return Located(finding.ranks, (), finding.text)
        return None


async def read_recorders(
    state: JobState, active: Sequence[Node], views: Sequence[RankView]
) -> CloserFindings:
    """Read the flight recorders of all ranks, as far as they answer in time."""
    world, epoch = state.world, state.world.epoch
    places = [(node, world.place_of(node)) for node in active]
    wanted = {
        (node.key, local)
        for node, place in places
        if place is not None
        for local in range(len(world.ranks[place]))
    }
    with state.bus.ask(
        LookedCloser, lambda token: [(node, LookCloser(token)) for node in active], repeat=False
    ) as asked:
        await asked.until(lambda: asked.answered(wanted) or world.epoch != epoch, QUICK)
    recorded = [one for _, reply in asked.replies for one in reply.recorded]
    found = findings(recorded, {view.rank for view in views}) if recorded else ()
    return CloserFindings(found, held(recorded))
