"""PrologSlurmctld and EpilogSlurmctld: starts requeued robust jobs at once, refills the pool.

slurmctld waits only for the stub, which leaves this process running in a session of its own. The
process ends within LIFE_S, whatever Slurm or a file system does, and never retries: if it fails,
Slurm's own delay and the timer of the pool do the same, later.
"""

from __future__ import annotations

import os
import signal
import sys
import syslog
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

from health.controller import pool, records
from health.node.trust import slurm_path
from health.settings import PLACES, SITE_FILE
from health.settings_file import parse, read
from health.settings_last import SUFFIX
from robust_slurm.text import one_line

LIFE_S = 180  # Slurm's own two minutes, and the epilogs before them
SLURM_S = 10.0  # for one question to Slurm


class HookEvent(NamedTuple):
    """The variables that slurmctld sets. ``name``: the job's, as Slurm's commands take it."""

    context: str
    job: int
    name: str
    uid: int
    gid: int
    partition: str
    ran_s: float | None = None  # from 24.05 on


class HookSite(NamedTuple):
    """The settings of robust.toml. ``state_dir`` is absolute; "": none."""

    state_dir: str
    slurm_bin: str = ""


def event_of(env: Mapping[str, str]) -> HookEvent | None:
    """Read the environment; None: not of a simple job's start or end. Pure."""
    numbers = [env.get(f"SLURM_JOB_{key}", "") for key in ("ID", "UID", "GID")]
    if not all(word.isascii() and word.isdigit() for word in numbers) or "SLURM_HET_JOB_ID" in env:
        return None
    job, uid, gid = map(int, numbers)
    array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else str(job)
    context = env.get("SLURM_SCRIPT_CONTEXT", "")
    partition, ran_s = env.get("SLURM_JOB_PARTITION", ""), None
    times = [env.get(f"SLURM_JOB_{key}_TIME", "") for key in ("START", "END")]
    if all(word.isdecimal() and word.isascii() for word in times):
        ran_s = float(times[1]) - float(times[0])
    return HookEvent(context, job, name, uid, gid, partition, ran_s)


def site_of(path: str) -> HookSite:
    """Read robust.toml, or the copy of it that is left. Raises OSError, ValueError."""
    try:
        found = parse(read(path)[0])
    except FileNotFoundError:
        try:
            found = parse(read(path + SUFFIX)[0])
        except FileNotFoundError:
            found = {}
    state_dir, gate = found.get("state_dir", ""), found.get("gate", {})
    slurm_bin = gate.get("slurm_bin", "") if isinstance(gate, dict) else ""
    if not (isinstance(state_dir, str) and state_dir.startswith("/")):
        state_dir = ""
    return HookSite(state_dir.rstrip("/"), slurm_bin if isinstance(slurm_bin, str) else "")


def say(text: str) -> None:
    """Log one line: slurmctld does not read what this process prints."""
    text = one_line(text, 300)  # parts of it may be a user's
    print(f"robust: {text}", file=sys.stderr)
    syslog.syslog(syslog.LOG_INFO, text)


def main() -> int:
    """Exit code 0 whatever happens: another one of PrologSlurmctld would requeue the job."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_S)
    syslog.openlog("robust-slurm", 0, syslog.LOG_DAEMON)
    try:
        event = event_of(os.environ)
        if event is not None:
            site = site_of(os.environ.get("ROBUST_SITE_CONFIG") or SITE_FILE)
            places = f"{site.slurm_bin}:{PLACES}" if site.slurm_bin else PLACES
            os.environ["PATH"], holes = slurm_path(places)
            for hole in holes:
                say(f"Slurm's commands there are not run: {hole}")
            react(event, site)
    except Exception as error:  # noqa: BLE001 - the job goes on as without us
        say(f"controller hook: {type(error).__name__}: {error}")
    return 0


def react(event: HookEvent, site: HookSite) -> None:
    """Do what a job's start or end calls for."""
    if event.context == "prolog_slurmctld":
        begun(event, site)
    elif event.context == "epilog_slurmctld":
        ended(event, site)
    else:
        say(f"controller hook: slurmctld did not call it (SLURM_SCRIPT_CONTEXT={event.context})")


def begun(event: HookEvent, site: HookSite) -> None:
    """Make the job's directory, and refill the pool that a standby allocation has used."""
    if not site.state_dir:
        return
    with records.opened(site.state_dir) as jobs:
        records.make(jobs, event.job, event.uid, event.gid)
    if _due(event, site):
        time.sleep(pool.SETTLE_S)
        _refill(event, site)


def ended(event: HookEvent, site: HookSite) -> None:
    """Start the job again, or remove its unused directory, once its old run is over."""
    with records.opened(site.state_dir) if site.state_dir else nullcontext() as jobs:
        _follow(event, site, jobs)


def _follow(event: HookEvent, site: HookSite, jobs: int | None) -> None:
    from health.controller.decide import is_robust
    from health.controller.follow import JobFollower
    from robust_slurm.slurm import Slurm

    refill = _due(event, site)
    ours = jobs is not None and records.has_run(jobs, event.job, event.uid)
    door = Slurm(deadline_s=SLURM_S, ping_first=True)
    until = time.monotonic() + LIFE_S - SLURM_S
    follower = JobFollower(door, event.name, event.uid, until, ran_s=event.ran_s)
    job = follower.read_job()
    if job is not None and (ours or is_robust(job.raw.get("AdminComment", ""))):
        made = follower.start(
            lambda: records.plan_of(jobs, event.job, event.uid) if jobs is not None else None
        )
        if made.step == "start":
            say(f"job {event.name}: requeued, starts in {made.at - time.time():.0f} s")
        elif made.why != "it is COMPLETED":
            say(f"job {event.name}: left to Slurm: {made.why}")
    elif refill or (jobs is not None and records.closed_to_users(jobs)):
        job = follower.ended()
    if jobs is not None and (job is None or job.finished):
        records.remove_unused(jobs, event.job, event.uid)
    if refill:
        _refill(event, site)


def _due(event: HookEvent, site: HookSite) -> bool:
    try:
        if not (site.state_dir and os.access(f"{site.state_dir}/standby", os.W_OK)):
            return False  # no pool, or the timer's alone: it is not SlurmUser's
        return pool.due(pool.read(site.state_dir), event.partition)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # of another shape, too
        say(f"the record of the standby pool cannot be read: {error}")
        return False


def _refill(event: HookEvent, site: HookSite) -> None:
    if not _due(event, site):
        return
    signal.alarm(int(pool.APPLY_S) + 5)
    if failed := pool.apply(site.state_dir):
        say(f"robust-standby apply: {failed}")
