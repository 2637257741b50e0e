"""The hooks as slurmctld calls them: the environment, the following, the pool."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_decide import job

from health.controller import hook, pool
from health.controller.follow import JobFollower
from health.controller.hook import HookEvent, HookSite, event_of, site_of
from robust_slurm.slurm import Job, SlurmError
from robust_slurm.state_dir.requeue_plan import RequeuePlan

ENV = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_UID": "20001",
    "SLURM_JOB_GID": "20002",
    "SLURM_JOB_PARTITION": "train",
    "SLURM_SCRIPT_CONTEXT": "epilog_slurmctld",
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, HookEvent("epilog_slurmctld", 12, "12", 20001, 20002, "train")),
        (
            {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"},
            HookEvent("epilog_slurmctld", 12, "10_3", 20001, 20002, "train"),
        ),
        (
            {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"},
            HookEvent("epilog_slurmctld", 12, "12", 20001, 20002, "train", 600.0),
        ),
        ({"SLURM_HET_JOB_ID": "12"}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_UID": "-1"}, None),
        ({"SLURM_JOB_GID": "٣"}, None),
    ],
)
def test_event_of(changes: dict[str, str], found: HookEvent | None) -> None:
    assert event_of(ENV | changes) == found


def test_site_of(tmp_path: Path) -> None:
    path = tmp_path / "robust.toml"
    assert site_of(str(path)) == HookSite("")
    path.write_text('state_dir = "/srv/robust/"\n[gate]\nslurm_bin = "/opt/s/bin"\n')
    assert site_of(str(path)) == HookSite("/srv/robust", "/opt/s/bin")
    path.rename(f"{path}.last")
    assert site_of(str(path)) == HookSite("/srv/robust", "/opt/s/bin"), "the last good copy"
    path.write_text('state_dir = "~/robust"\ngate = 3\n')
    assert site_of(str(path)) == HookSite("")
    path.chmod(0o666)
    with pytest.raises(OSError, match="can be written by others"):
        site_of(str(path))


class FakeDoor:
    """Shows the job in these states in turn; the last one stays."""

    def __init__(self, *states: Job | None) -> None:
        self.states = list(states)
        self.starts: list[tuple[str, float]] = []

    def job(self, job_id: int | str) -> Job:
        shown = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if shown is None:
            raise SlurmError("not_found", ("scontrol",), "Invalid job id specified")
        return shown

    def config(self) -> dict[str, str]:
        return {}

    def update_job(self, job_id: int | str, *, start_time: float | str) -> None:
        self.starts.append((str(job_id), float(start_time)))


def pending(**changes: str) -> Job:
    now = int(time.time())
    times = {"SubmitTime": str(now), "EligibleTime": str(now + 121)}
    return job(**(times | changes))


COMPLETING = job(JobState="COMPLETING", StartTime="1000", EndTime="1600")


def followed(door: FakeDoor, plan: RequeuePlan | None | Exception = None, s: float = 60) -> Any:
    def read() -> RequeuePlan | None:
        if isinstance(plan, Exception):
            raise plan
        return plan

    pauses: list[float] = []
    until = time.monotonic() + s
    follower = JobFollower(door, "12", 20001, until, lambda pause: pauses.append(pause))
    return follower.start(read), len(pauses)


def test_a_requeued_job_is_started_once_when_its_old_run_is_over() -> None:
    door = FakeDoor(COMPLETING, COMPLETING, pending(Restarts="7"))
    began = time.time()
    decision, pauses = followed(door)
    assert decision.step == "start" and pauses == 2  # it ran 600 s: no short run
    [(name, at)] = door.starts
    assert name == "12" and began + 1 < at <= time.time() + 4


def test_a_plan_that_slurm_does_not_know_yet_is_waited_for() -> None:
    door = FakeDoor(pending(ExcNodeList="(null)"), pending(ExcNodeList="n2"))
    assert followed(door, RequeuePlan(0, ("n2",)))[0].step == "start"
    door = FakeDoor(pending(ExcNodeList="(null)"))
    decision, _ = followed(door, RequeuePlan(0, ("n2",)), 0.0)
    assert decision.step == "leave" and "n2 is not excluded" in decision.why and not door.starts


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), ValueError("no plan")])
def test_a_plan_that_cannot_be_read_leaves_the_job_to_slurm(error: Exception) -> None:
    door = FakeDoor(pending())
    assert followed(door, error)[0].step == "leave" and not door.starts


@pytest.mark.parametrize(
    "last", [job(JobState="COMPLETED"), job(JobState="RUNNING"), job(UserId="other(7)"), None]
)
def test_other_ends_are_left_alone(last: Job | None) -> None:
    door = FakeDoor(COMPLETING, last)
    assert followed(door)[0].step == "leave" and not door.starts


def test_it_gives_up_at_its_deadline() -> None:
    door = FakeDoor(COMPLETING)
    assert followed(door, s=0.0)[0].step == "leave" and not door.starts


# ---- the pool

POOL: dict[str, Any] = {
    "wish": {"partition": "standby", "source": "train", "backfill": "scavenge"},
    "done": {"train": {"created": False, "removed": ["n4", "n5"]}},
    "admitted": {"n4": {}, "n5": {}},
    "short_since": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "partition", "found"),
    [
        ({}, "standby", True),
        ({}, "scavenge", False),
        ({}, "train", False),
        ({"short_since": 5.0}, "train", True),
        ({"admitted": {"n4": {}}}, "train", True),  # n5 joins when its jobs are over
        ({}, "other", False),
        ({}, "", False),
        ({"wish": {"partition": "standby"}}, "train", False),
    ],
)
def test_when_the_pool_may_have_changed(
    changes: Mapping[str, Any], partition: str, found: bool
) -> None:
    assert pool.due(POOL | dict(changes), partition) is found
    assert pool.due({}, partition) is False


def test_read_of_the_pools_record(tmp_path: Path) -> None:
    assert pool.read(str(tmp_path)) == {}
    (tmp_path / "standby").mkdir()
    assert pool.read(str(tmp_path)) == {}
    (tmp_path / "standby" / "pool.json").write_text("[]")
    assert pool.read(str(tmp_path)) == {}
    (tmp_path / "standby" / "pool.json").write_text('{"wish": {}}')
    assert pool.read(str(tmp_path)) == {"wish": {}}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"wish": "standby"}'])
def test_a_bad_record_of_the_pool_costs_only_the_refill(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "standby").mkdir()
    (tmp_path / "standby" / "pool.json").write_text(text)
    hook.begun(HookEvent("prolog_slurmctld", 12, "12", 1, 1, "standby"), HookSite(str(tmp_path)))
    assert "the record of the standby pool cannot be read" in capfd.readouterr().err


# ---- as a whole


@pytest.mark.parametrize(
    ("recorded", "comment", "started"),
    [(True, "(null)", True), (False, "robust=full", True), (False, "robust=off", False)],
)
def test_who_is_started_and_when_the_pool_is_refilled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: bool, comment: str, started: bool
) -> None:
    uid = os.geteuid()
    door = FakeDoor(pending(AdminComment=comment, UserId=f"me({uid})"))
    applied: list[str] = []
    monkeypatch.setattr("robust_slurm.slurm.Slurm", lambda **_: door)
    monkeypatch.setattr(pool, "apply", lambda state_dir: applied.append(state_dir) or "")
    monkeypatch.setattr(pool, "SETTLE_S", 0.0)
    monkeypatch.setattr(hook.signal, "alarm", lambda _s: 0)
    (tmp_path / "jobs" / "12").mkdir(parents=True)
    if recorded:
        (tmp_path / "jobs" / "12" / "accusations").mkdir()
    (tmp_path / "standby").mkdir()
    event, site = (
        HookEvent("epilog_slurmctld", 12, "12", uid, uid, "train"),
        HookSite(str(tmp_path)),
    )
    hook.react(event, site)
    assert bool(door.starts) is started and not applied
    (tmp_path / "standby" / "pool.json").write_text(json.dumps(POOL))
    hook.react(event, site)
    assert not applied, "a job of train changes nothing while the pool is full"
    hook.react(event._replace(partition="standby"), site)
    hook.react(event._replace(partition="standby", context="prolog_slurmctld"), site)
    assert applied == [str(tmp_path)] * 2


def test_without_a_state_directory_the_mark_of_job_submit_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for comment, starts in (("robust=full", 1), ("(null)", 0)):
        door = FakeDoor(pending(AdminComment=comment))
        monkeypatch.setattr("robust_slurm.slurm.Slurm", lambda door=door, **_: door)
        event = HookEvent("epilog_slurmctld", 12, "12", 20001, 20001, "train")
        hook.react(event, HookSite(""))
        assert len(door.starts) == starts


def test_whatever_happens_the_exit_code_is_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "robust.toml").write_text(f'state_dir = "{tmp_path}/gone"\n')
    monkeypatch.setattr(os, "environ", ENV | {"ROBUST_SITE_CONFIG": f"{tmp_path}/robust.toml"})
    monkeypatch.setattr(hook.signal, "alarm", lambda _s: 0)
    for context in ("prolog_slurmctld", "epilog_slurmctld"):
        os.environ["SLURM_SCRIPT_CONTEXT"] = context
        assert hook.main() == 0
        assert "FileNotFoundError" in capfd.readouterr().err
    os.environ["SLURM_SCRIPT_CONTEXT"] = "prolog_slurmd"
    assert hook.main() == 0
    assert "slurmctld did not call it" in capfd.readouterr().err
