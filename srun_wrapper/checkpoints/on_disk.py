"""List the steps of the durable tier, and narrow down what stores hold."""

from __future__ import annotations

from collections.abc import Collection

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.durable.files import DurableError
from robust_slurm.checkpoint.planning import plan as planner
from srun_wrapper.job.reporting.report import say
from srun_wrapper.run_in_thread import run_in_thread


async def committed(directory: str, limit: float) -> list[tier.DurableStep]:
    """Return the committed steps in the directory, as far as they can be read in ``limit`` s."""
    if not directory:
        return []
    try:
        found, unreadable = await run_in_thread(lambda: tier.list_steps(directory), limit)
    except (OSError, DurableError, TimeoutError) as err:
        why = str(err) or f"no answer in {limit:g} s (checkpoint_list_limit)"
        say(f"checkpoints: cannot list {directory}: {why}")
        return []
    for step, reason in unreadable.items():
        say(f"checkpoints: durable step {step} is not used: {reason}")
    return found


def only(places: list[planner.Holder], states: Collection[tuple[int, int]]) -> list[planner.Holder]:
    """Return the places with the copies of these (step, epoch) alone."""
    return [
        place._replace(holdings=[h for h in place.holdings if (h.step, h.epoch) in states])
        for place in places
    ]


def replaced(
    places: list[planner.Holder], step: int, checked: list[planner.Holder]
) -> list[planner.Holder]:
    """Return the known holdings of the stores, with those found when this step was read."""
    found = {place.store: place.holdings for place in checked}
    return [
        place._replace(
            holdings=[
                *(held for held in place.holdings if held.step != step),
                *found.get(place.store, ()),
            ]
        )
        for place in places
    ]
