"""Replay a job in small worlds to find the bad node: the last rung before it gives up.

All nodes are used at once, in groups that are jobs of their own: the job's own command with less
data parallelism and a few steps. Which groups, and what follows, is in
``health.active.coordinator.replay``; here they are run. The program has to take part:
see ``docs/active-tests.md``, "Replay".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy

from health.active.coordinator.replay import ReplayLayoutError, Round, next_groups, over, verdict
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import last_error
from srun_wrapper.job.model import Role
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.spikes import Spikes
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.orders.machine_tests import PROGRAM_ERRORS, MachineResults
from srun_wrapper.replay.orders import WorldShape, shape
from srun_wrapper.replay.outcome import read
from srun_wrapper.replay.small_worlds import SmallWorlds

ALL_ROUNDS = 4.0  # limits of one round, for the whole search


def due(diagnosis: Diagnosis, failures: int, blamed: Sequence[str], replayed: bool) -> bool:
    """True if the job must be replayed before the next rung; see ``machine_tests.due``."""
    if replayed or blamed or not diagnosis.root.launched:
        return False
    if diagnosis.cause in ("node", "shared") or diagnosis.tests == "never":
        return False
    return failures >= 2 and not PROGRAM_ERRORS.match(last_error(diagnosis.root.tail))


class Replay:
    """Replays the job, whose ranks are down, in rounds until the bad nodes are known."""

    def __init__(self, state: JobState, worlds: SmallWorlds, topology: Topology) -> None:
        self._state = state
        self._worlds = worlds
        self._topology = topology

    async def dual_phase(self) -> MachineResults | None:
        """Find the bad nodes. None if a node was lost or the job ended in between."""
        state = self._state
        # Steps of a replay are no progress of the job, and say nothing about its pace.
        kept = (state.progress, state.pace, state.nonfinite, state.world.steppers)
        spikes, state.spikes = state.spikes, Spikes()
        state.progress, state.pace, state.nonfinite = deepcopy(kept[:3])
        try:
            return await self._search()
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            return MachineResults({}, (f"replay: internal error: {type(err).__name__}: {err}",))
        finally:
            state.progress, state.pace, state.nonfinite, state.world.steppers = kept
            state.spikes = spikes

    async def _search(self) -> MachineResults | None:
        config = self._state.config
        places = self._state.world.places
        names = [node.name for node in places]
        try:
            cut = self._shape()
        except (ReplayLayoutError, ValueError) as err:
            return MachineResults({}, (f"the job cannot be replayed: {err}",))
        if any(node.role is not Role.ACTIVE or node.connection is None for node in places):
            return MachineResults({}, ("the job cannot be replayed: a node is missing",))
        until = time.monotonic() + ALL_ROUNDS * config.replay_limit
        rounds: list[Round] = []
        whys: list[dict[int, str]] = []
        while not (why := over(cut.layout, rounds, config.replay_rounds)):
            groups = next_groups(cut.layout, rounds)
            if time.monotonic() >= until:
                why = f"{ALL_ROUNDS * config.replay_limit:g} s have passed"
                break
            if not groups:
                why = "too few nodes are left for a group"
                break
            say(
                f"replay {len(rounds) + 1}: {len(groups)} groups of {cut.layout.m} nodes, "
                f"{config.replay} steps, up to {config.replay_limit:g} s"
            )
            outcomes = await self._worlds.run(cut, groups)
            if outcomes is None:
                return None
            bad = frozenset(g for g, o in outcomes.items() if o.result == "bad")
            unknown = frozenset(g for g, o in outcomes.items() if o.result == "unknown")
            rounds.append(Round(groups, bad, unknown))
            whys.append({number: o.why for number, o in outcomes.items()})
        of_machine = [names[place] for place in cut.order]
        found = read(verdict(cut.layout, rounds), rounds, whys, of_machine, why)
        for line in found.lines:
            say(line)
        return found

    def _shape(self) -> WorldShape:
        mesh = self._topology.mesh()
        if not mesh:
            raise ReplayLayoutError("the parallel mesh is unknown; set --robust-mesh=pp=2,dp=8")
        per_place = self._topology.ranks_of_places(mesh)
        return shape(mesh, per_place, len(self._state.world.places))
