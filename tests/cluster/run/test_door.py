"""The door to Slurm, used as its callers use it, against a real slurmctld."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import until

from lab import Cluster

_HEAD = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from robust_slurm.slurm import Slurm, SlurmError
slurm = Slurm(deadline_s=20)
def kind(call):
    try:
        call()
    except SlurmError as error:
        assert error.hint and error.message and str(error)
        return error.kind
    return "done"
"""
_NO_SUCH = ("not_found", "invalid")
SLEEP = "#!/bin/bash\nsleep 600\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=3, standby=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clean(lab: Cluster) -> Iterator[None]:
    yield
    lab.exec("head", ["scancel", "-u", lab.user])
    until(lambda: all(flags == {"IDLE"} for flags in lab.nodes().values()), "idle nodes")


def door(lab: Cluster, code: str, *, user: bool = True, env: dict[str, str] | None = None) -> Any:
    """Run ``code`` in the cluster and return its ``out``; ``slurm`` is the door."""
    program = f"{_HEAD}\n{code}\nprint(json.dumps(out, default=sorted))"
    done = lab.exec("head", ["python", "-c", program], user=user, env=env, check=True)
    return json.loads(done.stdout)


def test_questions(lab: Cluster) -> None:
    job = lab.sbatch(SLEEP, ["-N2", "-J", "name = with+signs", "--comment=a b=c"])
    lab.wait_job(job, "RUNNING")
    out = door(
        lab,
        f"job = slurm.job({job})\n"
        "out = {'ping': slurm.ping(), 'config': slurm.config(),"
        " 'nodes': {n: x.state for n, x in slurm.nodes().items()},"
        " 'partitions': {n: [p.nodes, p.default] for n, p in slurm.partitions().items()},"
        " 'states': slurm.job_states(), 'jobs': [j.id for j in slurm.jobs(job.user)],"
        " 'job': [job.name, job.comment, job.state, job.nodes, job.user, job.uid, job.batch_host,"
        "  job.restarts, job.requeue, job.partition], 'batch': slurm.batch_script(job.id)}",
    )
    assert out["ping"] is True
    assert out["config"]["ClusterName"] == lab.name
    assert out["nodes"] == {n: sorted(flags) for n, flags in lab.nodes().items()}
    assert out["partitions"] == {"train": [["n1", "n2", "n3"], True], "standby": [["s1"], False]}
    assert out["states"][str(job)] == "RUNNING" and job in out["jobs"]
    who = [lab.user, lab.uid, "n1", 0, True, "train"]
    assert out["job"] == ["name = with+signs", "a b=c", "RUNNING", ["n1", "n2"], *who]
    assert out["batch"] == SLEEP


def test_submit_keeps_the_environment_as_it_is(lab: Cluster) -> None:
    odd = "a,b c\n'd' \"e\" $f"
    script = '#!/bin/bash\nprintf %s "$ODD" > odd.part\nmv odd.part odd\n'
    environ = f"{{**os.environ, 'ODD': {odd!r}, 'SLURM_JOB_ID': '7'}}"
    out = door(lab, f"out = Slurm(deadline_s=20, environ={environ}).submit({script!r})")
    lab.wait_job(int(out), "COMPLETED")
    assert (lab.shared / "odd").read_text() == odd


def test_shrink_leaves_the_rest_running(lab: Cluster) -> None:
    script = "#!/bin/bash\nsrun --no-kill bash -c 'touch at.$SLURM_NODEID; exec sleep 600'\n"
    job = lab.sbatch(script, ["-N3", "--no-kill"])
    until(lambda: len(list(lab.shared.glob("at.*"))) == 3, "three tasks")
    began = time.monotonic()
    call = f"slurm.shrink({job}, ['n1', 'n3'])"
    out = door(lab, f"{call}; {call}; out = slurm.job({job}).nodes")
    assert out == ["n1", "n3"]
    assert time.monotonic() - began < 20
    until(lambda: lab.nodes()["n2"] == {"IDLE"}, "n2 is free")
    assert lab.job(job)["JobState"] == "RUNNING"
    assert not list(lab.shared.rglob("*resize*"))
    assert door(lab, f"out = kind(lambda: slurm.shrink({job}, ['s1']))") == "invalid"


def test_requeue_cancel_and_update(lab: Cluster) -> None:
    job = lab.sbatch(SLEEP, ["-N1", "--requeue"])
    lab.wait_job(job, "RUNNING")
    refused = f"slurm.update_job({job}, partition='standby')"
    assert door(lab, f"out = kind(lambda: {refused})") == "conflict"
    door(lab, f"slurm.requeue({job}); out = 0")
    assert lab.wait_job(job, "PENDING")["Restarts"] == "1"
    change = f"slurm.update_job({job}, partition='train,standby', exclude=['n1', 'n2'])"
    now = f"slurm.update_job({job}, start_time=time.time())"
    # Until the last of the old run is gone, Slurm puts its own start time over ours.
    until(lambda: "COMPLETING" not in lab.job(job)["JobState"], "the old run is gone")
    until(lambda: all(flags == {"IDLE"} for flags in lab.nodes().values()), "idle nodes")
    door(lab, f"{change}; {now}; out = 0")
    record = lab.wait_job(job, "RUNNING")
    assert record["NodeList"] in ("n3", "s1")
    door(lab, f"slurm.cancel({job}); slurm.cancel({job}); out = 0")
    lab.wait_job(job, "CANCELLED")
    door(lab, f"slurm.cancel({job}); slurm.cancel(999999); out = 0")
    assert door(lab, "out = kind(lambda: slurm.job(999999))") == "not_found"
    assert door(lab, "out = kind(lambda: slurm.requeue(999999))") == "not_found"


def test_only_operators_drain(lab: Cluster) -> None:
    drain = "out = kind(lambda: slurm.drain('n1', 'bad'))"
    assert door(lab, drain) == "denied"
    assert lab.nodes()["n1"] == {"IDLE"}
    assert door(lab, "out = kind(lambda: slurm.drain('nope,n1', 'bad'))", user=False) in _NO_SUCH
    assert lab.nodes()["n1"] == {"IDLE"}
    code = "out = [slurm.drain('n1', 'bad [memory]').done, slurm.nodes(['n1'])['n1'].reason]"
    assert door(lab, code, user=False) == [True, "robust: bad (memory)"]
    assert lab.nodes()["n1"] == {"IDLE", "DRAIN"}
    assert door(lab, "out = kind(lambda: slurm.undrain('n1'))") == "denied"
    assert door(lab, "out = slurm.undrain('n1').done", user=False) is True
    until(lambda: lab.nodes()["n1"] == {"IDLE"}, "n1 is back")


def test_an_operators_reason_is_never_touched(lab: Cluster) -> None:
    words = ["scontrol", "update", "nodename=n2", "state=drain", "reason=replace the fan"]
    lab.exec("head", words, user=False, check=True)
    try:
        code = "out = [slurm.drain('n2', 'x').done, slurm.undrain('n2').done]"
        assert door(lab, code, user=False) == [False, False]
        assert lab.node_records()["n2"]["Reason"].startswith("replace the fan")
        assert "DRAIN" in lab.nodes()["n2"]
    finally:
        words = ["scontrol", "update", "nodename=n2", "state=resume"]
        lab.exec("head", words, user=False, check=True)


def test_no_controller(lab: Cluster) -> None:
    conf = (lab.spec.dir / "etc" / "slurm.conf").read_text()
    (lab.shared / "dead.conf").write_text(conf.replace("SlurmctldPort=6817", "SlurmctldPort=6899"))
    env = {"SLURM_CONF": str(lab.shared / "dead.conf")}
    began = time.monotonic()
    code = "slurm = Slurm(deadline_s=2); out = [slurm.ping(), kind(lambda: slurm.nodes())]"
    ping, kind = door(lab, code, env=env)
    assert ping is False and kind in ("timeout", "unreachable")
    assert time.monotonic() - began < 30


def test_a_dead_file_system_does_not_hold_the_caller() -> None:
    code = "out = kind(lambda: Slurm(deadline_s=0.5).nodes())"
    with Cluster(nodes=1, standby=0, scratch=True) as lab:
        conf = lab.spec.scratch_dir / "slurm.conf"
        lab.stale_mount("n1")
        program = f"{_HEAD}\n{code}\nprint(json.dumps(out))"
        argv = ["python", "-c", program]
        done = lab.exec("n1", argv, env={"SLURM_CONF": str(conf)}, check=True, timeout=20)
    assert json.loads(done.stdout) == "timeout"  # scontrol itself takes no signal there
