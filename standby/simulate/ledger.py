"""The mix of a site's own jobs: its incidents by symptom, per node-day that its jobs ran."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from robust_slurm.state_dir.files import read_jobs
from robust_slurm.state_dir.records import IncidentRecord
from standby.simulate.events import WISH, Kind
from standby.size.history import DAY
from standby.size.ledger import MAX_JOBS, Ledger

SHOWS = {
    "crash": "exit",
    "node_lost": "node",
    "hang": "hang",
    "stuck": "mount",
    "nan": "nan",
    "differs": "nan",
    "sdc": "nan",
    "slow": "slow",
    "update": WISH,
}


class LedgerError(ValueError):
    """A state directory of which no mix can be made; the text says why."""


def mix(state_dir: Path, since_days: float | None) -> tuple[str, tuple[Kind, ...]]:
    """Return what was read, and the kinds. Raises LedgerError."""
    try:
        if not state_dir.is_dir():
            raise LedgerError(f"{state_dir} is not a directory")
    except OSError as error:
        raise LedgerError(f"cannot read {state_dir}: {error.strerror or error}") from None
    now = time.time()
    since = now - since_days * DAY if since_days else 0.0
    seen = Ledger(state_dir, now)
    node_days = seen.observed(None, since).node_days
    if node_days <= 0.0:
        if seen.problems:
            raise LedgerError(seen.problems[0])
        raise LedgerError(f"no job in {state_dir / 'jobs'} has recorded how long its nodes ran")
    jobs, _ = read_jobs(state_dir, most=MAX_JOBS)  # as many as the node-days are of
    known = (job for job in jobs if job.job_id in seen.spans)
    incidents = [one for job in known for one in job.incidents if one.time > since]
    what = f"{len(incidents)} incidents in {node_days:,.1f} node-days of {state_dir}"
    return what, kinds(incidents, node_days)


def kinds(incidents: list[IncidentRecord], node_days: float) -> tuple[Kind, ...]:
    """Return a kind for each symptom.

    Every restart is an incident of its own in the records, so no restarts in vain are added.
    """
    by: defaultdict[str, list[IncidentRecord]] = defaultdict(list)
    for one in incidents:
        if one.symptom in SHOWS:
            by[one.symptom].append(one)
    return tuple(
        Kind(
            name=symptom.replace("_", " "),
            shows=SHOWS[symptom],
            per_1000=1000.0 * len(some) / node_days,
            machine=sum(bool(one.swaps) for one in some) / len(some),
            named=True,
        )
        for symptom, some in sorted(by.items())
    )
