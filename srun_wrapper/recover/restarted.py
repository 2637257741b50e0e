"""Criteria for a successful restart: ranks step again or, where no steps are seen, stay alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srun_wrapper.decide.incident import Incident

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

LIVED = 10.0  # s that ranks without steps live at least before they count as recovered
LIVED_MOST = 600.0  # s; a command may run for days before it fails
RESUMED = 1.0  # s for the ranks' word of what they resumed from, which goes another way than steps


def proving_time(lived: float) -> float:
    """Seconds that ranks without steps must live; the last epoch lived for ``lived`` seconds."""
    return min(max(lived, LIVED), LIVED_MOST)


async def proven(boss: Supervisor, incident: Incident, lived: float) -> bool:
    """Wait for the new epoch's first step everywhere; False if another failure came.

    Until then nothing is recovered: ranks that die again before a step are the same trouble.
    """
    state, world = boss.state, boss.state.world
    stepped_before = bool(world.steppers)

    def over() -> bool:
        return bool(state.failures) or state.signalled > 0 or boss.step.ended

    await state.until(lambda: over() or world.all_started(), None)
    incident.mark("launch")
    incident.warm, incident.ranks = world.warm, world.started
    if stepped_before:
        await state.until(lambda: over() or world.all_stepped(), None)
    elif not over():
        boss.phase = "starting"
        await state.until(
            lambda: over() or world.all_exited() or bool(world.steppers), proving_time(lived)
        )
    if state.failures:
        # Until it failed again it brought nothing; from then on it is the next incident's time.
        until = min(failure.last_good for failure in state.failures)
        incident.marks["first_step"] = max(until, incident.marks["launch"])
        return False
    if over():
        return True  # the step is being ended
    if world.steppers:
        incident.mark("first_step")
        incident.fresh = not stepped_before
        incident.resume_step = await _resumed(boss)
    else:
        incident.marks["first_step"] = incident.marks["launch"]
    return True


async def _resumed(boss: Supervisor) -> int | None:
    """The first step that was done after the restart; None if that cannot be known.

    What the ranks were given is not yet what they resumed from: a script may start anew.
    """
    state, restored = boss.state, boss.restoring.step

    def told() -> bool:
        return boss.checkpoints.resumed_in == state.world.epoch

    if restored is not None:
        await state.until(told, RESUMED)
    first = restored + 1 if restored is not None and told() else None
    seen = state.progress.resume if state.progress.numbered else None
    return min((step for step in (first, seen) if step is not None), default=None)
