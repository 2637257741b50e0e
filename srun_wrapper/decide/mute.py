"""The time at which a silent node whose kernel answers is lost (pure).

Its robust-task may be stopped (a person, a debugger, a frozen cgroup, a paused machine) while its
ranks compute. They wait for one another, so steps of the others show that its ranks live.
"""

from __future__ import annotations

STUCK = 3.0  # steps that others may seem to make without a member that is stuck


def mute_at(
    heard: float, stepped: float, unusual: float | None, limit: float, longest: float
) -> float:
    """Return the time at which it is lost.

    ``heard``: its last word; ``stepped``: the last step of ranks on other nodes; ``unusual``: s
    without a step that are unusual for the job, None: nobody can say; ``limit``: s that count then;
    ``longest``: s that count where steps say nothing.
    """
    if unusual is None:
        return heard + max(limit, longest)
    return max(heard, stepped) + max(limit, unusual)


def steps_on(stepped: float, since: float, step_time: float | None) -> bool:
    """True if steps were made after ``since`` that a stuck member would not have allowed."""
    return step_time is not None and stepped - since > STUCK * step_time
