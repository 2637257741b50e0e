"""Recomputed steps: what the stores hold, and which nodes could compute a step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from robust_slurm.checkpoint.format.state_sum import StateSum
from robust_slurm.checkpoint.planning import plan as planner
from srun_wrapper.checkpoints.verify_rules import Results, Seat, exchange
from srun_wrapper.protocol.checkpoint_messages import StateSums, TakeSums
from srun_wrapper.supervisor.roster import Node
from srun_wrapper.supervisor.state import JobState

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

READ = 20.0  # s for the stores to answer, and for every
READ_RATE = 1e9  # bytes that they read, 8 more


async def results(boss: Supervisor, step: int, over: Callable[[], bool]) -> Results:
    """Of all ranks, as their stores read them now; none if some do not answer in time."""
    epoch, world = boss.state.world.epoch, boss.checkpoints.world
    found: dict[int, StateSum] = {}
    nodes = boss.state.live()
    with boss.bus.ask(
        StateSums, lambda token: [(node, TakeSums(token, step)) for node in nodes]
    ) as asked:

        def whole() -> bool:
            while asked.replies:  # each is looked at once: ten thousand stores answer one by one
                _, sums = asked.replies.pop()
                found.update((each.owner, each) for each in sums.found if each.epoch == epoch)
            return len(found) >= world

        size = max((saved.size for saved in boss.checkpoints.saved.values()), default=0)
        await asked.until(lambda: whole() or over(), READ + 8 * size / READ_RATE)
    return found if len(found) == world else {}


async def before(boss: Supervisor, step: int) -> tuple[int, int] | None:
    """The newest step before this one that memory has whole, and its epoch."""
    places = await boss.restoring.stock()
    world = boss.checkpoints.world
    sets, _ = planner.usable(places, world)
    found = [
        key
        for key, copies in sets.items()
        if key[0] < step and key[1] == boss.state.world.epoch and len(copies) == world
    ]
    return max(found, default=None)


def exchanged(boss: Supervisor) -> list[Node] | None:
    """The node of each place, another one than now; None where there is none."""
    state, pod = boss.state, boss.neighbours.pod
    spares = state.spares()
    seats = [
        Seat(node.name, node.slots, len(ranks), pod(node.name))
        for node, ranks in zip(state.world.places, state.world.ranks, strict=True)
    ]
    idle = [Seat(node.name, node.slots, 0, pod(node.name)) for node in spares]
    names = exchange(seats, idle)
    known = {node.name: node for node in (*spares, *state.world.places)}
    return None if names is None else [known[name] for name in names]


def spent(state: JobState) -> bool:
    """True if some rank has read more input than is kept for its next incarnation."""
    return any(not all(node.stdin.values()) for node in state.world.places)
