"""The start of a requeued job: a table of everything that speaks against it."""

from __future__ import annotations

from typing import Any

import pytest

from health.controller.decide import SAFE_S, decide, is_robust, waits
from robust_slurm.slurm.model import Job, job_from
from robust_slurm.state_dir.requeue_plan import RequeuePlan

NOW = 1_000_000.0


def job(**changes: str) -> Job:
    """A robust job that Slurm has just requeued: it waits 121 s."""
    record = {
        "JobId": "12",
        "UserId": "trainer(20001)",
        "JobState": "PENDING",
        "Reason": "BeginTime",
        "Priority": "4294901759",
        "Requeue": "1",
        "Restarts": "1",
        "BatchFlag": "2",
        "SubmitTime": "999999",
        "EligibleTime": "1000120",
        "NumNodes": "2-2",
        "ExcNodeList": "n2",
    }
    return job_from({**record, **changes})


def test_a_requeued_job_starts_when_the_credential_is_gone() -> None:
    found = decide(job(), None, {120}, 600.0, NOW)
    assert (found.step, found.at) == ("start", NOW + SAFE_S)


@pytest.mark.parametrize(
    ("changes", "step", "why"),
    [
        ({"JobState": "COMPLETING"}, "wait", "not over"),
        ({"JobState": "PENDING+COMPLETING"}, "wait", "not over"),
        ({"JobState": "PENDING,REQUEUED"}, "wait", "not over"),
        ({"JobState": "RUNNING"}, "leave", "RUNNING"),
        ({"JobState": "CONFIGURING"}, "leave", "CONFIGURING"),
        ({"JobState": "COMPLETED"}, "leave", "COMPLETED"),
        ({"JobState": "REQUEUE_HOLD"}, "leave", "REQUEUE_HOLD"),
        ({"Priority": "0"}, "leave", "held"),
        ({"Reason": "JobHeldUser"}, "leave", "held"),
        ({"Reason": "JobHeldAdmin"}, "leave", "held"),
        ({"BatchFlag": "0"}, "leave", "batch"),
        ({"HetJobId": "12"}, "leave", "batch"),
        # a start time of its own: the user's --begin, an update by hand, robust-srun's helper
        ({"EligibleTime": "1003600"}, "leave", "been set"),
        ({"EligibleTime": "1000060"}, "leave", "been set"),
        ({"EligibleTime": "1000123"}, "leave", "been set"),
        ({"EligibleTime": "Unknown"}, "leave", "no time"),
        ({"SubmitTime": "Unknown"}, "leave", "no time"),
        ({"EligibleTime": "1000003"}, "leave", "by itself"),
        ({"EligibleTime": "999999"}, "leave", "by itself"),
        # Slurm's second may be another one than ours
        ({"EligibleTime": "1000119"}, "start", "requeued"),
        ({"Reason": "None"}, "start", "requeued"),
        ({"Reason": "Resources"}, "start", "requeued"),
    ],
)
def test_only_slurms_own_delay_is_cut(changes: dict[str, str], step: str, why: str) -> None:
    found = decide(job(**changes), None, {120}, 600.0, NOW)
    assert (found.step, why in found.why) == (step, True), found


@pytest.mark.parametrize(
    ("restarts", "ran_s", "step"),
    [
        (1, 2.0, "start"),
        (2, None, "start"),
        (3, 2.0, "leave"),  # a job that fails wherever it starts gets Slurm's own pauses
        (3, None, "leave"),
        (3, 61.0, "start"),
        (40, 3600.0, "start"),
    ],
)
def test_a_job_that_fails_at_once_again_and_again_waits(
    restarts: int, ran_s: float | None, step: str
) -> None:
    assert decide(job(Restarts=str(restarts)), None, {120}, ran_s, NOW).step == step


@pytest.mark.parametrize(
    ("plan", "step", "at"),
    [
        (RequeuePlan(0, ("n2",)), "start", SAFE_S),
        (RequeuePlan(0), "start", SAFE_S),
        (RequeuePlan(0, ("n2", "n3")), "wait", None),  # the helper has not told Slurm yet
        (RequeuePlan(0, ("n2",), 2, NOW + 33), "start", 33),
        (RequeuePlan(0, ("n2",), 2, NOW - 33), "start", SAFE_S),
        (RequeuePlan(0, ("n2",), 2, NOW + 1e6), "leave", None),
        (RequeuePlan(0, ("n2",), 3), "wait", None),  # the old run has lost one of three
        # of another run: somebody else has requeued the job this time
        (RequeuePlan(1, ("n3",)), "start", SAFE_S),
        (RequeuePlan(7, ("n3",)), "start", SAFE_S),
    ],
)
def test_the_plan_of_robust_srun_comes_first(plan: RequeuePlan, step: str, at: float) -> None:
    found = decide(job(), plan, {120}, 600.0, NOW)
    assert found.step == step
    assert at is None or found.at == NOW + at


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, {120}),
        ({"AuthInfo": "(null)", "SchedulerParameters": "(null)"}, {120}),
        ({"AuthInfo": "socket=/run/x,cred_expire=30"}, {120, 30}),
        ({"AuthInfo": "cred_expire=x"}, {120}),
        ({"SchedulerParameters": "batch_sched_delay=0,requeue_delay=10"}, {120, 10}),
        ({"AuthInfo": "cred_expire=30", "SchedulerParameters": "requeue_delay=10"}, {120, 30, 10}),
    ],
)
def test_how_long_slurm_lets_a_requeued_job_wait(config: dict[str, str], found: set[int]) -> None:
    assert waits(config) == found
    for wait in found:
        again = job(EligibleTime=str(999_999 + wait + 1))
        assert decide(again, None, found, 600.0, NOW).step == "start"


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("robust=full", True),
        ("site; robust=full", True),
        ("robust=full,x=1", True),
        ("robust=observe", False),
        ("robust=off", False),
        ("(null)", False),
        ("", False),
        ("not-robust=full", False),
        ("robust=fuller", False),
    ],
)
def test_who_is_robust_by_job_submit(comment: str, found: bool) -> None:
    assert is_robust(comment) is found


def test_what_a_user_writes_into_the_own_comment_counts_for_nothing() -> None:
    fields: Any = job(Comment="AdminComment=robust=full").raw
    assert not is_robust(fields.get("AdminComment", ""))
