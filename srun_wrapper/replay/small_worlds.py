"""Run one round of a replay: groups of the job's nodes, each a small world of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from health.active.coordinator.replay import Group
from srun_wrapper.job.facts import JobFacts
from srun_wrapper.job.model import Rank
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.replay.orders import WorldShape, replay_orders
from srun_wrapper.replay.outcome import GroupResult, compare, group_result

TICK = 0.2  # s between looks at the groups


@dataclass(slots=True)
class RunningWorld:
    """A group that is being replayed."""

    ranks: list[Rank]
    places: tuple[int, ...]
    outcome: GroupResult | None = None


class SmallWorlds:
    """Starts groups of nodes as small jobs, and waits for their outcomes."""

    def __init__(
        self,
        state: JobState,
        stopping: Stopping,
        facts: JobFacts,
        journal: Journal,
        over: Callable[[], bool],
    ) -> None:
        """``over``: True if a node was lost or the end came."""
        self._state = state
        self._stopping = stopping
        self._facts = facts
        self._journal = journal
        self._interrupted = over

    async def run(self, cut: WorldShape, groups: Sequence[Group]) -> dict[int, GroupResult] | None:
        """Replay these groups at once. None when a node was lost or the end came."""
        state, config = self._state, self._state.config
        if self._interrupted():
            return None
        all_beat = state.world.steppers >= set(state.world.by_rank)
        extra = self._facts.rank_env(state.step_id)
        orders = replay_orders(state, cut, groups, config.replay, config.stop_grace, extra)
        # Ends of these ranks are no failures of the job, their silence is no hang, and signals
        # that are sent meanwhile wait for the ranks to come.
        state.members.stop_epoch()
        epoch = state.world.epoch
        state.world.steppers = set(state.world.steppers)
        for node, order in orders:
            state.bus.send(node, order)
        world = state.world
        running: dict[int, RunningWorld] = {}
        for number, group in enumerate(groups):
            places = cut.places(group)
            ranks = [world.by_rank[rank] for place in places for rank in world.ranks[place]]
            running[number] = RunningWorld(ranks, places)
        began = time.monotonic()
        while not self._interrupted() and any(each.outcome is None for each in running.values()):
            left = began + config.replay_limit - time.monotonic()
            if left <= 0:
                break
            await state.until(self._interrupted, min(TICK, left))
            inner = self._inner()
            for each in running.values():
                if each.outcome is None:
                    ranks = [*each.ranks, *(r for at in each.places for r in inner.get(at, ()))]
                    each.outcome = group_result(
                        ranks,
                        config.replay,
                        all_beat=all_beat,
                        nan=config.nan != "ignore",
                        sent=state.passed_on,
                    )
                    if each.outcome is not None:
                        for place in each.places:
                            state.bus.send(world.places[place], Stop(epoch, config.stop_grace))
        await self._stopping.end_ranks([node for node, _ in orders], self._interrupted)
        if self._interrupted():
            return None
        late = f"not finished after {config.replay_limit:g} s"
        found = {
            number: each.outcome or GroupResult("unknown", late) for number, each in running.items()
        }
        if config.replay_fixed and (note := compare(found)):
            say(f"replay: {note}")
        self._record(found, running, time.monotonic() - began)
        return found

    def _inner(self) -> Mapping[int, Sequence[Rank]]:
        """Return the ranks that torchruns have started, by place."""
        found: dict[int, list[Rank]] = {}
        for (place, _), rank in self._state.world.inner.items():
            found.setdefault(place, []).append(rank)
        return found

    def _record(
        self, found: dict[int, GroupResult], running: dict[int, RunningWorld], took: float
    ) -> None:
        names = [node.name for node in self._state.world.places]
        record = [
            {
                "nodes": [names[place] for place in running[number].places],
                "result": outcome.result,
                "why": outcome.why,
            }
            for number, outcome in found.items()
        ]
        self._journal.event("replay", groups=record, seconds=round(took, 3))
