"""Decides whether a requeued job starts again at once. Pure.

Slurm delays every requeued job, by two minutes by default, until the credential of its old run has
expired everywhere. Only that delay is cut short: a start time that somebody has set stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from health.admin.show_config import seconds, value_of, words_of
from robust_slurm.slurm.model import Job
from robust_slurm.slurm.values import epoch, integer
from robust_slurm.state_dir.requeue_plan import RequeuePlan

SAFE_S = 3  # as robust-srun's helper waits: a start in the second of the revocation kills the job
SLURMS_S = 120  # cred_expire, where nothing is set
SLACK_S = 2  # Slurm counts whole seconds
SHORT_RUN_S = 60.0
SHORT_RUNS = 3
LONGEST_S = 3600.0  # longest delay that a plan may ask for
_ROBUST = re.compile(r"(^|[\s,;])robust=full($|[\s,;])")

Step = Literal["wait", "start", "leave"]


class StartDecision(NamedTuple):
    """``wait``: look again; ``start`` at ``at`` (seconds since 1970); ``leave`` it to Slurm."""

    step: Step
    why: str
    at: int = 0


def is_robust(admin_comment: str) -> bool:
    """Return whether job_submit.lua has marked the job: only operators write AdminComment."""
    return _ROBUST.search(admin_comment) is not None


def waits(config: Mapping[str, str]) -> set[int]:
    """Return the seconds that Slurm may let a requeued job wait.

    slurmctld reads its settings for this only once, so that Slurm's default counts too.
    """
    found = {SLURMS_S}
    for key, name in (("AuthInfo", "cred_expire"), ("SchedulerParameters", "requeue_delay")):
        for word in words_of(value_of(config, key)):
            option, _, value = word.partition("=")
            if option.strip().lower() == name and (number := seconds(value)) is not None:
                found.add(int(min(number, 86400)))
    return found


def completing(job: Job) -> bool:
    """Return whether the old run still has processes or epilogs."""
    return bool({"COMPLETING", "REQUEUED"} & {job.state, *job.flags})


def decide(
    job: Job,
    plan: RequeuePlan | None,
    waits: Collection[int],
    ran_s: float | None,
    now: float,
) -> StartDecision:
    """Decide about a robust job. ``ran_s``: how long its last run took; None: not known."""
    if completing(job):
        return StartDecision("wait", "its old run is not over")
    if job.state != "PENDING":
        return StartDecision("leave", f"it is {job.state}")
    if not job.batch or job.raw.get("HetJobId"):
        return StartDecision("leave", "it is no simple batch job")
    if integer(job.raw.get("Priority"), 1) == 0 or (job.reason or "").startswith("JobHeld"):
        return StartDecision("leave", "it is held")
    begin, submitted = epoch(job.raw.get("EligibleTime")), epoch(job.raw.get("SubmitTime"))
    if begin is None or submitted is None:
        return StartDecision("leave", "Slurm names no time of its start")
    if begin <= now + SAFE_S:
        return StartDecision("leave", "it starts by itself")
    # Slurm sets both in one moment: the time of the new submission, and then plus its delay.
    if not any(abs(begin - submitted - wait) <= SLACK_S for wait in waits):
        return StartDecision("leave", "its start time has been set")
    if job.restarts >= SHORT_RUNS and (ran_s is None or ran_s < SHORT_RUN_S):
        return StartDecision("leave", f"restart {job.restarts}, and its last run was short")
    at = now + SAFE_S
    if plan is not None and plan.restarts + 1 == job.restarts:
        if missing := sorted(set(plan.exclude) - set(job.exclude)):
            return StartDecision("wait", f"{missing[0]} is not excluded yet")
        if job.num_nodes < plan.nodes:
            return StartDecision("wait", f"it asks for {job.num_nodes} of {plan.nodes} nodes")
        if plan.not_before > now + LONGEST_S:
            return StartDecision("leave", "its plan asks for a start too far away")
        at = max(at, plan.not_before)
    return StartDecision("start", "requeued", round(at))
