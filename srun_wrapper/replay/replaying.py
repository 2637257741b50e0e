"""The last rung before a job gives up: replay it in small worlds to find the node that is bad.

All nodes are used at once, in groups that are jobs of their own: the job's own command with less
data parallelism and a few steps. Which groups, and what follows, is in
``health.active.coordinator.replay``; here they are run. The program has to take part:
see ``docs/active-tests.md``, "Replay".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from health.active.coordinator.replay import Group, LayoutError, Round, next_groups, over, verdict
from srun_wrapper.decide.diagnose import Diagnosis, last_error
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.recover.machine_tests import PROGRAM_ERRORS, Found
from srun_wrapper.recover.stopping import stop_ranks
from srun_wrapper.replay.orders import Shape, replay_orders, shape
from srun_wrapper.replay.outcome import Outcome, compare, look, read
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import Rank, Role
from srun_wrapper.supervisor.topology import layout as ranks_of_places
from standby.placement.spread import parse_mesh

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

ALL_ROUNDS = 4.0  # limits of one round, for the whole search
TICK = 0.2  # s between looks at the groups


class Asked(NamedTuple):
    """Parameters of a replay; see the settings of the same names."""

    steps: int
    limit: float
    """s for one round, start-up included."""
    quiet: int
    """Rounds in a row without a failure, then no more."""
    fixed: bool
    """The program feeds the same data and weights in every group: compare their losses."""


@dataclass(slots=True)
class Running:
    """A group that is being replayed."""

    ranks: list[Rank]
    places: tuple[int, ...]
    outcome: Outcome | None = None


def due(diagnosis: Diagnosis, failures: int, blamed: Sequence[str], replayed: bool) -> bool:
    """True if the job must be replayed before the next rung; arguments as ``stop_tests.due``."""
    if replayed or blamed or not diagnosis.root.launched:
        return False
    if diagnosis.cause in ("node", "shared"):
        return False
    return failures >= 2 and not PROGRAM_ERRORS.match(last_error(diagnosis.root.tail))


class Replay:
    """Replays the job of a supervisor whose ranks are down."""

    def __init__(self, supervisor: Supervisor, asked: Asked) -> None:
        self._boss = supervisor
        self._asked = asked

    async def dual_phase(self) -> Found | None:
        """Find the bad nodes. None if a node was lost or the job ended in between."""
        state = self._boss.state
        # What ranks did in a replay is no progress of the job, and no pace to go by.
        kept = (state.progress, state.pace, state.nans, state.world.steppers)
        state.progress, state.pace, state.nans = deepcopy(kept[:3])
        try:
            return await self._search()
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            return Found({}, (f"replay: internal error: {type(err).__name__}: {err}",))
        finally:
            state.progress, state.pace, state.nans, state.world.steppers = kept

    async def _search(self) -> Found | None:
        boss, asked = self._boss, self._asked
        places = boss.state.world.places
        names = [node.name for node in places]
        try:
            cut = self._shape()
        except (LayoutError, ValueError) as err:
            return Found({}, (f"the job cannot be replayed: {err}",))
        if any(node.role is not Role.ACTIVE or node.connection is None for node in places):
            return Found({}, ("the job cannot be replayed: a node is missing",))
        until = time.monotonic() + ALL_ROUNDS * asked.limit
        rounds: list[Round] = []
        whys: list[dict[int, str]] = []
        while not (why := over(cut.layout, rounds, asked.quiet)):
            groups = next_groups(cut.layout, rounds)
            if time.monotonic() >= until:
                why = f"{ALL_ROUNDS * asked.limit:g} s are over"
                break
            if not groups:
                why = "too few nodes are left for a group"
                break
            say(
                f"replay {len(rounds) + 1}: {len(groups)} groups of {cut.layout.m} nodes, "
                f"{asked.steps} steps, up to {asked.limit:g} s"
            )
            outcomes = await self.phase(cut, groups)
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

    def _shape(self) -> Shape:
        boss = self._boss
        world, named = boss.state.world, boss.config.mesh
        mesh = boss.checkpoints.mesh() or (parse_mesh(named) if named else {})
        if not mesh:
            raise LayoutError("its mesh is not known: say --robust-mesh=pp=2,dp=8")
        per_place = ranks_of_places(mesh, world.ranks, boss.launch.command.command)
        return shape(mesh, per_place, len(world.places))

    async def phase(self, cut: Shape, groups: Sequence[Group]) -> dict[int, Outcome] | None:
        """Replay these groups at once. None when a node was lost or the end came."""
        boss, state, asked = self._boss, self._boss.state, self._asked
        if self._interrupted():
            return None
        all_beat = state.world.steppers >= set(state.world.by_rank)
        extra = {**boss.launch.rank_env, "ROBUST_RUN_ID": boss.run_id}
        orders = replay_orders(state, cut, groups, asked.steps, boss.config.stop_grace, extra)
        # Ends of these ranks are no failures of the job, their silence is no hang, and signals
        # that are sent meanwhile wait for the ranks to come.
        state.stopping_epoch = epoch = state.world.epoch
        state.world.steppers = set(state.world.steppers)
        for node, order in orders:
            boss.bus.send(node, order)
        world = state.world
        running: dict[int, Running] = {}
        for number, group in enumerate(groups):
            places = cut.places(group)
            ranks = [world.by_rank[rank] for place in places for rank in world.ranks[place]]
            running[number] = Running(ranks, places)
        began = time.monotonic()
        while not self._interrupted() and any(each.outcome is None for each in running.values()):
            left = began + asked.limit - time.monotonic()
            if left <= 0:
                break
            await state.until(self._interrupted, min(TICK, left))
            inner = self._inner()
            for each in running.values():
                if each.outcome is None:
                    ranks = [*each.ranks, *(r for at in each.places for r in inner.get(at, ()))]
                    each.outcome = look(
                        ranks,
                        asked.steps,
                        all_beat=all_beat,
                        nan=boss.config.nan != "ignore",
                        sent=state.passed_on,
                    )
                    if each.outcome is not None:
                        for place in each.places:
                            boss.bus.send(world.places[place], Stop(epoch, boss.config.stop_grace))
        await stop_ranks(boss, [node for node, _ in orders], self._interrupted)
        if self._interrupted():
            return None
        late = f"not at its end after {asked.limit:g} s"
        found = {
            number: each.outcome or Outcome("unknown", late) for number, each in running.items()
        }
        self._tell(found, running, time.monotonic() - began)
        return found

    def _inner(self) -> Mapping[int, Sequence[Rank]]:
        """Ranks that torchruns have started, by place."""
        found: dict[int, list[Rank]] = {}
        for (place, _), rank in self._boss.state.world.inner.items():
            found.setdefault(place, []).append(rank)
        return found

    def _tell(self, found: dict[int, Outcome], running: dict[int, Running], took: float) -> None:
        names = [node.name for node in self._boss.state.world.places]
        if self._asked.fixed and (note := compare(found)):
            say(f"replay: {note}")
        record = [
            {
                "nodes": [names[place] for place in running[number].places],
                "result": outcome.result,
                "why": outcome.why,
            }
            for number, outcome in found.items()
        ]
        self._boss.ledger.event("replay", groups=record, seconds=round(took, 3))

    def _interrupted(self) -> bool:
        state = self._boss.state
        return bool(state.failures) or state.signalled > 0 or self._boss.step.ended
