"""Lemons: nodes by the jobs that excluded them and went on without them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from status.story import Suspicion

LISTED = 2  # votes from which on a node belongs to the list of nodes to exclude
WINDOW = 28 * 86400.0  # s; older reports no longer exclude, as in the gate's [lemon] window_days
CLOCKS = 300.0  # s that two machines' clocks may differ; a report from later is not believed


@dataclass(frozen=True)
class Lemon:
    """A node that jobs have excluded."""

    name: str
    jobs: int  # that excluded it
    users: int  # of those jobs
    progressed: int  # of those jobs: those that made steps without it (retry success)
    confirmed: int  # reports that the gate's checks or tests confirmed
    cleared: int  # reports whose node passed the gate's checks
    withdrawn: int  # reports that their jobs took back
    newest: float  # time of the newest report
    proven_good: float | None  # time of the newest proof that it is good
    drained: str  # reason of the drain that stands
    exclude: bool  # see ``excluded``


def votes(jobs: Collection[tuple[int, int]], reader: int) -> int:
    """Count jobs, given as (job, uid); a user's jobs count once, since users can forge records.

    The reader's own jobs count each. Jobs of an unknown user (-1) do not count.
    """
    own = {job for job, uid in jobs if uid == reader}
    return len(own) + len({uid for _, uid in jobs if uid not in (reader, -1)})


def excludes(one: Suspicion) -> bool:
    """True if a job keeps away from the node because of this suspicion."""
    return one.reported and one.verdict not in ("withdrawn", "refused")


def excluded(found: Sequence[Suspicion], proven_good: float, reader: int, now: float) -> bool:
    """True if the node belongs to the list of nodes to exclude.

    It needs at least ``LISTED`` votes of jobs that excluded it within ``WINDOW``, after the newest
    proof that the node is good, and then made steps without it.
    """
    since = max(proven_good, now - WINDOW)
    jobs = {
        (one.of_job, one.uid)
        for one in found
        if excludes(one) and one.progressed and since < one.time <= now + CLOCKS
    }
    return votes(jobs, reader) >= LISTED


def lemon(
    found: Sequence[Suspicion], proven_good: float, drained: str, reader: int, now: float
) -> Lemon | None:
    """The row of a node; None if no job ever reported it. ``reader``: uid of who asks."""
    reported = [one for one in found if one.reported]
    if not reported:
        return None
    excluding = {(one.of_job, one.uid) for one in reported if excludes(one)}
    went_on = {one.of_job for one in reported if excludes(one) and one.progressed}
    verdicts = [one.verdict for one in reported]
    return Lemon(
        name=reported[0].node,
        jobs=len({job for job, _ in excluding}),
        users=len({uid for _, uid in excluding}),
        progressed=len(went_on),
        confirmed=verdicts.count("confirmed"),
        cleared=verdicts.count("cleared"),
        withdrawn=verdicts.count("withdrawn"),
        newest=max(one.time for one in reported),
        proven_good=proven_good or None,
        drained=drained,
        exclude=excluded(found, proven_good, reader, now),
    )


def order(rows: Sequence[Lemon]) -> list[Lemon]:
    """The worst first."""
    return sorted(
        rows,
        key=lambda row: (
            not row.exclude,
            -row.users,
            -row.progressed,
            -row.jobs,
            row.cleared + row.withdrawn,
            row.name,
        ),
    )
