"""A signal that requeues the job, as a whole: robust-srun, its shims and ranks, without Slurm."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from places import REPOSITORY
from srun_here import JOB, Step

pytestmark = pytest.mark.slow
# Shows a running job with so many seconds left, which is requeued from the first request on.
SCONTROL = """#!/bin/sh
cd {top}
echo "$*" >> calls
case "$*" in
*"show job"*)
    state='RUNNING Restarts=0'
    grep -q '^requeue' calls && state='COMPLETING Restarts=1'
    echo "JobId={job} JobName=x UserId=u(1) JobState=$state Reason=None Requeue=1 BatchFlag=1" \\
        "Partition=p NodeList=here BatchHost=here NumNodes=1 CPUs/Task=1 OverSubscribe=OK" \\
        "EndTime=$(($(date +%s) + {left})) Command=/x WorkDir=/tmp" ;;
esac
"""
RANK = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {repository!r})
import robust_slurm
def saves(*_):
    print("saved", flush=True)
    os._exit(0)
def requeues(*_):
    if os.environ["RANK"] == "0":
        subprocess.run(["scontrol", "requeue", "{job}"])
    os._exit(0)
handler = {{"saves": saves, "requeues": requeues, "goes on": signal.SIG_IGN}}.get("{handler}")
if handler:
    signal.signal(signal.SIGUSR2, handler)
for step in range(1, 2000):
    time.sleep(0.02)
    robust_slurm.beat(step)
    if step == 5:
        print("started", flush=True)
"""
REQUEUED = "robust-srun: SIGUSR2: the job is requeued\n"


@pytest.mark.parametrize(
    ("handler", "left", "code", "says"),
    [
        ("none", 100, 122, REQUEUED),
        ("saves", 100, 122, REQUEUED),
        ("goes on", 4, 122, REQUEUED),
        ("requeues", 100, 0, "SIGUSR2: the job is not requeued: it is in the queue already\n"),
    ],
    ids=["dies", "saves", "goes on", "requeues"],
)
def test_the_job_is_requeued_once(
    tmp_path: Path, handler: str, left: int, code: int, says: str
) -> None:
    step = Step(tmp_path, 2)
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(repository=str(REPOSITORY), job=JOB, handler=handler))
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(SCONTROL.format(top=tmp_path, job=JOB, left=left))
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 99\n")
    for program in (scontrol, sbatch):
        program.chmod(0o755)
    step.start(tmp_path, "--robust-requeue-on=USR2", sys.executable, str(script), ROBUST_WARM="0")
    step.until(lambda: step.said().count("started") == 2, "its steps")
    step.signal(signal.SIGUSR2)
    step.until(step.ended, "its end")
    assert step.close() == code, step.said()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count(f"requeue {JOB}") == 1, calls
    assert says in step.said() and step.said().count("saved") == 2 * (handler == "saves")
    assert not list(step.state.rglob("incidents.jsonl")), "a signal is no fault"
