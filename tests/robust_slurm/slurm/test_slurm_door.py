"""The door's commands, against recorded answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_slurm import DATA, ENVIRON, OK, Recorded, door, failed, job_text, node_text, said

from robust_slurm.slurm import Completed, Slurm, SlurmError
from robust_slurm.slurm.ask import MOST_CLAIMS
from robust_slurm.slurm.door import printable


def test_questions_use_the_clean_environment() -> None:
    slurm, runner = door({"version": Completed(0, "slurm-wlm 22.05.8\n", "")})
    assert slurm.version() == (22, 5)
    assert runner.envs[0]["SLURM_TIME_FORMAT"] == "%s"
    assert "SLURM_JOB_ID" not in runner.envs[0]


def test_one_job_out_of_an_array() -> None:
    slurm, _ = door({"show job": said("22.05-jobs.txt")})
    with pytest.raises(SlurmError, match=r"imitates|without an owner"):
        slurm.job(17)
    text = "\n".join(
        line
        for line in (DATA / "22.05-jobs.txt").read_text().splitlines()
        if "ArrayJobId=19 " in line
    )
    slurm, _ = door({"show job": Completed(0, text, "")})
    assert slurm.job(19).array_task_id == "3-5%2"
    assert slurm.job("19_2").id == 23
    assert slurm.job(22).array_task_id == "1"
    with pytest.raises(SlurmError) as caught:
        slurm.job("19_77")
    assert caught.value.kind == "not_found"
    with pytest.raises(SlurmError) as caught:
        slurm.job("19 Partition=x")
    assert caught.value.kind == "invalid"


def test_a_users_jobs_are_read_one_by_one() -> None:
    """A name that holds a whole invented record is of no use in a list without names."""
    true, forged = job_text("n[1-2]"), "JobId=5 JobName=y UserId=a(7) NodeList=n9\n"
    listed = "5|ann|RUNNING\n4|ann|PENDING\n6|bob|RUNNING\n7|ann|COMPLETED\n8|ann|PENDING\n"
    slurm, runner = door(
        {
            "show job 5": true,
            "show job 4": Completed(0, forged, ""),
            "show job 8": failed("slurm_load_jobs error: Invalid job id specified"),
            "squeue": Completed(0, listed, ""),
        }
    )
    user = slurm.job(5).user
    slurm, runner = door({**runner.table, "squeue": Completed(0, listed.replace("ann", user), "")})
    assert [(job.id, job.state) for job in slurm.jobs(user)] == [(5, "RUNNING")]
    assert not any("%j" in word or word == "%k" for call in runner.calls for word in call)
    assert slurm.jobs(user, after=5) == [] and slurm.jobs("nobody") == []


def test_a_newline_in_a_jobs_name_claims_no_node_for_another_user() -> None:
    """Asked for names, squeue printed the second line of one as a job of its own."""
    name = "x\n901|PENDING|victim||robust-standby-500"
    names = {700: "robust-standby-100", 900: name, 902: "robust-standby-500"}
    owners = {700: "owner", 900: "mallory", 902: "mallory"}

    def squeue(argv: Sequence[str], *_: object) -> Completed:
        words = list(argv)
        columns = words[words.index("-o") + 1]
        asked = [int(words[words.index("-j") + 1])] if "-j" in words else list(names)
        forms = {"%A": str, "%T": lambda _n: "PENDING", "%u": owners.get, "%N": lambda _n: "",
                 "%j": names.get}  # fmt: skip
        rows = ["|".join(str(forms[c](n)) for c in columns.split("|")) for n in asked]
        return Completed(0, "".join(f"{row}\n" for row in rows), "")

    slurm = Slurm(runner=squeue)
    for _ in range(2):
        found = [(one.id, one.of, one.user) for one in slurm.standby_claims("lease")]
        assert found == [(700, 100, "owner"), (902, 500, "mallory")]


def test_a_users_many_claims_cost_a_bounded_number_of_questions_once() -> None:
    asked: list[Sequence[str]] = []

    def squeue(argv: Sequence[str], *_: object) -> Completed:
        asked.append(argv)
        if "-j" in argv:
            return Completed(0, "robust-standby-7\n", "")
        return Completed(0, "".join(f"{n}|PENDING|mallory|\n" for n in range(1000, 2000)), "")

    slurm = Slurm(runner=squeue)
    assert len(slurm.standby_claims("lease")) == MOST_CLAIMS
    assert len(slurm.standby_claims("lease")) == MOST_CLAIMS
    assert len(asked) == MOST_CLAIMS + 2


def test_job_states() -> None:
    slurm, _ = door({"squeue": Completed(0, "18|RUNNING\n22|PENDING\nnoise\n", "")})
    assert slurm.job_states() == {18: "RUNNING", 22: "PENDING"}
    slurm, _ = door({"squeue": failed("Unable to contact slurm controller (connect failure)")})
    with pytest.raises(SlurmError) as caught:
        slurm.job_states()
    assert caught.value.kind == "unreachable"


def test_why_jobs_wait() -> None:
    sentence = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority"
    text = f"Resources\nQOSMaxNodePerUserLimit\nResources\n{sentence}\n\n"
    slurm, _ = door({"squeue": Completed(0, text, "")})
    assert slurm.waiting_reasons("a name") == {"Resources", "QOSMaxNodePerUserLimit", sentence}


def test_nodes_that_slurm_does_not_know_are_missing() -> None:
    text = (DATA / "22.05-nodes-one-unknown.txt").read_text()
    slurm, runner = door({"show node": Completed(1, text, "")})
    assert set(slurm.nodes(["nope", "n1"])) == {"n1"}
    assert runner.calls[0][-1] == "n1,nope"
    assert slurm.nodes([]) == {}
    assert len(runner.calls) == 1
    with pytest.raises(SlurmError):
        slurm.nodes(["n1 State=DOWN"])


@pytest.mark.parametrize(
    "words", ["NFS connection timed out", "Zero Bytes were transmitted or received"]
)
def test_the_reason_of_one_node_is_no_error_of_slurm(words: str) -> None:
    """The reason stands on stdout before the line that another name is unknown."""
    known = node_text("IDLE+DRAIN", f"robust: {words}").stdout
    text = Completed(1, known + "Node nope not found\n", "")
    slurm, _ = door({"show node": text, "update": OK, "version": OK})
    assert set(slurm.nodes(["nope", "n1"])) == {"n1"}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [("n[1-", "node list"), ("n" * 4000, "cut off"), ("n[1-3]" + " " * 5000, "")],
)
def test_a_node_list_that_is_cut_off_is_refused(nodes: str, why: str) -> None:
    slurm, _ = door({"squeue": Completed(0, f"5|77|RUNNING|None|{nodes}|\nnoise\n", "")})
    if not why:
        assert [found.nodes for found in slurm.allotted("x")] == [("n1", "n2", "n3")]
        return
    with pytest.raises(SlurmError, match=why) as caught:
        slurm.allotted("x")
    assert caught.value.kind == "other"


def test_shrink_folds() -> None:
    slurm, runner = door({"show job": job_text("n[1-4]"), "update": OK})
    slurm.shrink(5, ["n1", "n2", "n4"])
    assert runner.orders() == [("scontrol", "update", "JobId=5", "NodeList=n[1-2,4]")]


def test_shrink_that_is_done_already_is_no_error() -> None:
    slurm, runner = door({"show job": job_text("n[1-2]")})
    slurm.shrink(5, ["n1", "n2", "n3"])
    assert runner.orders() == []
    for late in (failed("Job/step already completing or completed"), failed("Socket timed out")):
        slurm, _ = door(
            {"show": [job_text("n[1-3]"), job_text("n1")], "update": late},
        )
        slurm.shrink(5, ["n1", "n2"])


@pytest.mark.parametrize(
    ("job", "update", "kind"),
    [
        (job_text("(null)", "PENDING"), OK, "conflict"),
        (job_text("n[1-3]"), failed("Invalid user id for job 5"), "denied"),
        (job_text("n[3-4]"), OK, "invalid"),
        (job_text("n[1-3]"), failed("Job update not available right now, the DB index is being "
                                    "set, try again in a bit for job 5"), "conflict"),
    ],
)  # fmt: skip
def test_shrink_refused(job: Completed, update: Completed, kind: str) -> None:
    slurm, _ = door({"show job": job, "update": update})
    with pytest.raises(SlurmError) as caught:
        slurm.shrink(5, ["n1", "n2"])
    assert caught.value.kind == kind


def test_update_is_one_request() -> None:
    slurm, runner = door({"update": OK})
    slurm.update_job(
        "5_3", partition="train,standby", exclude=["n2", "n1"], start_time=1.7e9, requeue=True
    )
    assert runner.calls == [
        ("scontrol", "update", "JobId=5_3", "Partition=train,standby", "ExcNodeList=n[1-2]",
         time.strftime("StartTime=%Y-%m-%dT%H:%M:%S", time.localtime(1.7e9)), "Requeue=1"),
    ]  # fmt: skip
    slurm.update_job(5, exclude=[])
    assert runner.calls[-1][-1] == "ExcNodeList="
    slurm.update_job(5)
    assert len(runner.calls) == 2


def test_cancel_of_a_job_that_is_gone_is_no_error() -> None:
    slurm, runner = door({"scancel": failed("error: Job/step already completing or completed")})
    slurm.cancel(5)
    assert runner.calls == [("scancel", "5")]
    slurm, _ = door({"scancel": failed("error: Access/permission denied", 210)})
    with pytest.raises(SlurmError):
        slurm.cancel(5)


def test_submit_gives_the_job_its_environment_and_nothing_of_ours() -> None:
    runner = Recorded({"sbatch": Completed(0, "77;cluster\n", "sbatch: hello\n")})
    more = {"A": "x,y\nz", "SLURM_MEM_PER_CPU": "7", "SBATCH_QOS": "high"}
    slurm = Slurm(runner, environ=ENVIRON | more)
    assert slurm.submit("#!/bin/sh\n", args=["-N1"], cwd=Path("/")) == 77
    assert runner.calls == [("sbatch", "--parsable", "--export=ALL", "-N1")]
    assert runner.inputs == ["#!/bin/sh\n"]
    kept = {"PATH": "/usr/bin", "A": "x,y\nz", "SLURM_CONF": "/c", "HOME": "/h"}
    assert runner.envs == [kept]
    slurm, runner = door({"sbatch": failed("sbatch: error: Socket timed out on send/recv")})
    with pytest.raises(SlurmError):
        slurm.submit("#!/bin/sh\n")
    assert len(runner.calls) == 1


@pytest.mark.parametrize(
    ("state", "reason", "done"),
    [
        ("IDLE", "", True),
        ("MIXED+DRAIN", "robust: older", True),
        ("DOWN+NOT_RESPONDING", "Not responding", True),
        ("IDLE+DRAIN", "operator: disk", False),
        ("IDLE", "operator: disk", True),  # 24.11 keeps the reason of a drain that was ended
        ("IDLE+REBOOT_REQUESTED", "operator: firmware", False),
        ("IDLE+DRAIN", "Prolog error", False),
    ],
)
def test_drain_overwrites_nobodys_reason(state: str, reason: str, done: bool) -> None:
    slurm, runner = door({"show node": node_text(state, reason), "update": OK})
    result = slurm.drain("n1", 'bad "GPU" [x@1]\nReason=y')
    assert result.done is done
    assert (result.before.reason or "") == reason
    expected = ("scontrol", "update", "NodeName=n1", "State=DRAIN",
                "Reason=robust: bad GPU (x@1) Reason=y")  # fmt: skip
    assert runner.orders() == ([expected] if done else [])


@pytest.mark.parametrize(
    ("state", "reason", "done"),
    [
        ("IDLE+DRAIN", "robust: bad GPU", True),
        ("IDLE", "robust: bad GPU", False),
        ("IDLE+DRAIN", "operator: disk", False),
        ("IDLE+DRAIN", "", False),
    ],
)
def test_undrain_takes_back_only_what_is_ours(state: str, reason: str, done: bool) -> None:
    slurm, runner = door({"show node": node_text(state, reason), "update": OK})
    assert slurm.undrain("n1").done is done
    expected = [("scontrol", "update", "NodeName=n1", "State=UNDRAIN")]
    assert runner.orders() == (expected if done else [])


def test_drain_takes_one_known_node() -> None:
    slurm, _ = door({"show node": Completed(1, "Node n9 not found\n", "")})
    with pytest.raises(SlurmError) as caught:
        slurm.drain("n9", "x")
    assert caught.value.kind == "not_found"
    with pytest.raises(SlurmError) as caught:
        slurm.drain("n[1-2]", "x")
    assert caught.value.kind == "invalid"


def test_printable() -> None:
    assert printable("a\x1b[31m\tb\0c", 50) == "a?(31m b?c"
    assert printable("x" * 300, 200) == "x" * 200
