"""The last rung: how a job goes back to the queue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robust_slurm.slurm import Job, Slurm, SlurmError, SlurmNode
from robust_slurm.slurm.errors import Kind, classify
from srun_wrapper.decide.exclusions import BadNode
from srun_wrapper.requeue.requeue import helper_script, partitions_for, put_back


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": 12,
        "array_job_id": None,
        "array_task_id": None,
        "batch": True,
        "batch_host": "n1",
        "running": True,
        "state": "RUNNING",
        "user": "trainer",
        "partition": "train",
        "nodes": ("n1", "n2", "n3"),
        "num_nodes": 3,
        "requeue": True,
        "restarts": 0,
        "exclude": ("n9",),
        "name": "talk",
        "account": None,
        "qos": None,
        "reservation": None,
        "tres_per_node": None,
        "features": None,
        "time_limit_s": None,
        "cpus_per_task": 1,
        "min_memory_node_mb": None,
        "min_memory_cpu_mb": None,
        "oversubscribe": "OK",
        "work_dir": "/home",
        "comment": None,
        "finished": False,
        "raw": {},
    }
    return cast(Job, SimpleNamespace(**(values | changes)))


def node(name: str, state: str = "IDLE", partition: str = "train", features: str = "") -> SlurmNode:
    values: dict[str, Any] = {
        "name": name,
        "usable": state not in ("DOWN", "DRAIN"),
        "partitions": ("standby",) if name.startswith("s") else (partition,),
        "features": tuple(features.split(",")) if features else (),
    }
    return cast(SlurmNode, SimpleNamespace(**values))


class Recorder:
    """Stands for the door to Slurm; ``fail`` names the call that is refused, as ``kind``."""

    def __init__(self, the_job: Job, fail: str = "", kind: Kind = "denied") -> None:
        self._job, self._fail, self._kind = the_job, fail, kind
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.able = ["n1", "n2", "n3", "n4", "s1"]
        self.others: list[Job] = []  # the user has more
        self.later: Job | None = None  # what it is after a refusal

    def _call(self, called: str, /, **args: Any) -> None:
        if called == self._fail:
            self._job = self.later or self._job
            raise SlurmError(self._kind, (called,), f"{called} refused")
        self.calls.append((called, args))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def args(self, name: str) -> dict[str, Any]:
        return next(args for called, args in self.calls if called == name)

    def job(self, _job_id: int) -> Job:
        return self._job

    def jobs(self, user: str, after: int, name: str) -> list[Job]:
        assert (user, after) == (self._job.user, self._job.id)
        return [self._job, *self.others]

    def nodes(self) -> dict[str, SlurmNode]:
        return {name: node(name) for name in self.able}

    def config(self) -> dict[str, str]:
        return {"SlurmdTimeout": "30 sec"}

    def partitions(self) -> dict[str, object]:
        return {"train": None, "standby": None}

    def submit(self, script: str, *, args: Sequence[str], **more: Any) -> int:
        self._call("submit", script=script, args=list(args), **more)
        return 13

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self._call("shrink", job_id=job_id, keep=list(keep))

    def requeue(self, name: str) -> None:
        self._call("requeue", name=name)

    def update_job(self, name: str, **changes: Any) -> None:
        self._call("update_job", name=name, **changes)

    def batch_script(self, _job_id: int) -> str:
        return "#!/bin/sh\ntrain\n"

    def cancel(self, job_id: int) -> None:
        self._call("cancel", job_id=job_id)


SIZE = {"SLURM_JOB_NUM_NODES": "3"}


def run(
    the_job: Job, bad: Sequence[str] = ("n2",), fail: str = "", standby: str = "standby"
) -> Recorder:
    recorder = Recorder(the_job, fail)
    assert (
        put_back(cast(Slurm, recorder), 12, [BadNode(name) for name in bad], standby, SIZE, 0).job
        == 12
    )
    return recorder


@pytest.mark.parametrize(
    ("partition", "standby", "both"),
    [
        ("train", "standby", "train,standby"),
        ("train,standby", "standby", "train,standby"),
        ("a,b", "c", "a,b,c"),
        ("train", "", "train"),
    ],
)
def test_partitions_for(partition: str, standby: str, both: str) -> None:
    assert partitions_for(job(partition=partition), standby) == both


def test_put_back_in_the_right_order() -> None:
    done = run(job())
    # The helper must be there before our own end, the lost node gone before the requeue.
    assert done.names() == ["shrink", "submit", "requeue", "update_job"]
    assert done.args("shrink")["keep"] == ["n1", "n3"]
    update = done.args("update_job")
    assert update["partition"] == "train,standby"
    assert tuple(update["exclude"]) == ("n9", "n2")
    assert update["num_nodes"] == 3
    assert update["within"] < 5  # 22.05 needs 5 s to refuse it, and Slurm is ending this process
    submitted = done.args("submit")
    assert "--exclude=n9,n2" in submitted["args"]
    assert "scontrol update JobId=12 " in submitted["script"]


def test_nothing_to_shrink() -> None:
    assert "shrink" not in run(job(nodes=("n1", "n3"))).names()
    assert "shrink" not in run(job(nodes=("n2",))).names()  # nothing would be left


def test_a_job_that_forbids_requeueing_is_asked_to_allow_it() -> None:
    done = run(job(requeue=False))
    assert done.calls[0] == ("update_job", {"name": "12", "requeue": True})


def test_an_array_task_is_named_as_such() -> None:
    done = run(job(array_job_id=10, array_task_id="4"))
    assert done.args("requeue")["name"] == "10_4"
    assert "scontrol update JobId=10_4 " in done.args("submit")["script"]


def test_an_unknown_standby_partition_is_not_named() -> None:
    assert run(job(), standby="nope").args("update_job")["partition"] == "train"


def test_interactive_jobs_cannot_be_requeued() -> None:
    with pytest.raises(SlurmError, match="only batch jobs"):
        run(job(batch=False))


def test_a_refused_requeue_is_an_error() -> None:
    with pytest.raises(SlurmError, match="requeue refused"):
        run(job(), fail="requeue")


def test_the_batch_host_is_kept_though_bad() -> None:
    done = run(job(), bad=("n1", "n2"))
    assert done.args("shrink")["keep"] == ["n1", "n3"]
    assert tuple(done.args("update_job")["exclude"]) == ("n9", "n1", "n2")


def test_a_job_that_takes_no_second_update_is_copied() -> None:
    recorder = Recorder(job(), "shrink", "conflict")
    assert put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0).job == 13
    assert recorder.names() == ["submit", "cancel"]
    submitted = recorder.args("submit")
    assert "train" in submitted["script"]
    assert {"--exclude=n9,n2", "--partition=train,standby"} <= set(submitted["args"])
    with pytest.raises(SlurmError, match="shrink refused"):
        put_back(cast(Slurm, Recorder(job(), "shrink")), 12, [BadNode("n2")], "standby", SIZE, 0)


def test_scontrol_killed_by_its_own_requeue_is_no_error() -> None:
    recorder = Recorder(job(), "requeue")
    recorder.later = job(running=False)
    assert put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0).job == 12
    assert recorder.names() == ["shrink", "submit", "update_job"]


def test_scancel_killed_by_its_own_signal_is_no_error() -> None:
    class Ending(Recorder):
        def cancel(self, job_id: int) -> None:
            super().cancel(job_id)
            raise SlurmError("other", ("scancel",), "exit code -15, no message")

    recorder = Ending(job(), "shrink", "conflict")
    assert put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0).job == 13


def test_without_a_helper_it_only_takes_longer() -> None:
    recorder, said = Recorder(job(), "submit"), list[str]()
    bad = [BadNode("n2")]
    assert put_back(cast(Slurm, recorder), 12, bad, "standby", SIZE, 0, (), said.append).job == 12
    assert "requeue" in recorder.names()
    assert len(said) == 1 and "starts only in about two minutes" in said[0]


def test_what_an_unanswered_request_has_done_is_not_done_twice() -> None:
    """slurmctld may have carried it out although the answer was lost."""
    recorder = Recorder(job(state="PENDING", running=False))
    assert put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0).job == 12
    assert not recorder.calls
    recorder = Recorder(job(), "shrink", "conflict")
    copy = {"id": 13, "comment": "robust: goes on for job 12"}
    recorder.others = [job(**copy | {"id": 9, "finished": True}), job(**copy)]
    assert put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0).job == 13
    assert recorder.names() == ["cancel"]


COMPLETING = {"state": "COMPLETING", "running": False}


@pytest.mark.parametrize("seen", ["at once", "after a refusal"])
def test_a_job_that_is_being_requeued_is_not_copied(seen: str) -> None:
    """slurmctld counts a restart with the request; a job that completes is not shrunk any more."""
    requeued = job(**COMPLETING, restarts=1)
    if seen == "at once":
        recorder = Recorder(requeued, "shrink", "conflict")
    else:
        recorder = Recorder(job(), "shrink", "conflict")
        recorder.later = requeued
    back = put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0)
    assert back == (12, ("n9", "n2"))
    assert recorder.names() == ["update_job"]  # the new run excludes n2, and is not started twice


@pytest.mark.parametrize("seen", ["at once", "after a refusal"])
def test_a_job_that_somebody_has_ended_does_not_come_back(seen: str) -> None:
    ended = job(**COMPLETING, restarts=1)
    recorder = Recorder(ended if seen == "at once" else job(restarts=1), "shrink", "conflict")
    recorder.later = ended
    with pytest.raises(SlurmError, match=r"does not run any more \(COMPLETING\)"):
        put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 1)
    assert not recorder.calls


def test_a_refusal_for_no_reason_is_no_second_update() -> None:
    """An errno that slurmctld had left over, or that its client got from this machine."""

    class Stray(Recorder):
        def shrink(self, job_id: int, keep: Sequence[str]) -> None:
            error = classify(("scontrol",), 1, "", "Resource temporarily unavailable for job 12")
            assert error is not None
            raise error

    recorder = Stray(job())
    with pytest.raises(SlurmError) as caught:
        put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0)
    assert caught.value.away and not recorder.calls


@pytest.mark.parametrize("call", ["update_job", "shrink", "submit", "requeue"])
def test_slurm_away_is_no_refusal(call: str) -> None:
    """The error is raised as such, to be tried again, and nothing else is done instead."""
    recorder = Recorder(job(requeue=False), call, "unreachable")
    with pytest.raises(SlurmError) as caught:
        put_back(cast(Slurm, recorder), 12, [BadNode("n2")], "standby", SIZE, 0)
    assert caught.value.away and "cancel" not in recorder.names()
    assert call == "requeue" or "requeue" not in recorder.names()


def test_enough_nodes_remain_for_the_requeued_job() -> None:
    """Slurm sees by itself whether the others are dead, before it starts the job."""
    bad = [BadNode("n2", time=1.0), BadNode("n1", time=2.0)]
    recorder, said = Recorder(job()), list[str]()
    recorder.able = ["n1", "n2", "n3", "n4"]
    assert put_back(cast(Slurm, recorder), 12, bad, "standby", SIZE, 0, (), said.append).job == 12
    assert tuple(recorder.args("update_job")["exclude"]) == ("n9", "n1")
    assert "StartTime=now+33" in recorder.args("submit")["script"]
    assert "--exclude=n9,n1,n2" in recorder.args("submit")["args"]  # the helper itself
    assert said == [
        "n2 is not excluded: too few other nodes are left for 3; the job starts in 33 s, when "
        "Slurm knows whether the node answers"
    ]
    recorder = Recorder(job(), "shrink", "conflict")
    recorder.able = ["n1", "n2", "n3", "n4"]
    assert put_back(cast(Slurm, recorder), 12, bad, "standby", SIZE, 0) == (13, ("n9", "n1"))
    assert {"--exclude=n9,n1", "--begin=now+33"} <= set(recorder.args("submit")["args"])


def test_what_an_earlier_run_has_excluded_is_not_the_users_wish() -> None:
    recorder = Recorder(job(exclude=("n9", "n4")))
    recorder.able = ["n1", "n2", "n3", "n4"]
    bad = [BadNode("n4", time=1.0), BadNode("n2", time=2.0)]
    put_back(cast(Slurm, recorder), 12, bad, "standby", SIZE, 0)
    assert tuple(recorder.args("update_job")["exclude"]) == ("n9", "n2")


def helper(tmp_path: Path, states: Sequence[str], refuse: int = 0) -> list[str]:
    """Run the helper with an scontrol that shows these states in turn; returns its updates."""
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        f'cd "{tmp_path}"\n'
        'if [ "$1" = update ]; then shift; echo "$@" >> updates\n'
        f"  [ $(wc -l < updates) -gt {refuse} ]; exit $?; fi\n"
        "[ -s states ] || exit 1\n"
        "head -n 1 states; sed -i 1d states\n"
    )
    scontrol.chmod(0o755)
    script = helper_script("12", ["ExcNodeList=n1,n2", "StartTime=now"], 0)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["sh", "-s"], input=script.encode(), env=env, timeout=20, check=False)
    assert ended.returncode == 0
    updates = tmp_path / "updates"
    return updates.read_text().splitlines() if updates.exists() else []


WANTED = "JobId=12 ExcNodeList=n1,n2 StartTime=now"


def test_the_helper_starts_a_pending_job(tmp_path: Path) -> None:
    states = ["JobState=RUNNING X", "JobState=COMPLETING X", "JobState=PENDING X"]
    assert helper(tmp_path, states) == [WANTED]


def test_the_helper_tries_again_while_it_is_refused(tmp_path: Path) -> None:
    assert helper(tmp_path, ["JobState=PENDING X"] * 5, refuse=2) == [WANTED] * 3


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETED", "FAILED", "TIMEOUT"])
def test_the_helper_leaves_a_finished_job_alone(tmp_path: Path, state: str) -> None:
    assert helper(tmp_path, [f"JobState={state} X"] * 2) == []


def test_the_helper_ends_when_the_job_was_started_before_it(tmp_path: Path) -> None:
    again = "JobState=RUNNING Reason=None Requeue=1 Restarts=1 BatchFlag=2"
    assert helper(tmp_path, ["JobState=RUNNING Requeue=1 Restarts=0 X", again]) == []
    assert (tmp_path / "states").read_text() == ""


def test_the_helper_ends_when_the_job_is_gone(tmp_path: Path) -> None:
    assert helper(tmp_path, []) == []


def test_nothing_of_the_changes_is_shell() -> None:
    script = helper_script("12", ["ExcNodeList=n[1-2]", "Comment=a b; rm -rf /"], 0)
    assert "'ExcNodeList=n[1-2]' 'Comment=a b; rm -rf /'" in script
