"""A job goes on with fewer nodes, keeps its global batch, and grows back, without a wrong number.

As a whole, but without Slurm: robust-srun, the shims of four nodes that are this machine, and ranks
with torch. ``srun``, ``scontrol`` and ``squeue`` are programs of the test's own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from planned_changes import PROGRAM, Line, check_same, check_shares, merged, read_lines
from srun_here import JOB, Step
from torch_forks import TorchForks

pytest.importorskip("torch")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.slow

STEPS = 400  # more than are made until the job has grown back
FIRST, AGAIN = 4, 6  # steps in the first world, and in each one after it
SRUN = f"""#!{sys.executable}
import os, subprocess, sys, time
words = sys.argv[1:]
command = words[next(n for n, word in enumerate(words) if not word.startswith("-")) :]
def start(node, number, tasks, **more):
    env = dict(os.environ, SLURM_STEP_ID="0", SLURM_NODEID=str(number), SLURM_PROCID=str(number),
               SLURM_GTIDS=str(number), SLURM_LOCALID="0", SLURMD_NODENAME=node,
               SLURM_STEP_NUM_NODES=str(tasks), SLURM_STEP_NUM_TASKS=str(tasks),
               SLURM_STEP_TASKS_PER_NODE=f"1(x{{tasks}})", SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    return subprocess.Popen(command, env=env | more)
if any("robust-standby" in word for word in words):
    while not os.path.exists("{{top}}/free"):
        time.sleep(0.05)
    tasks = [start(f"s{{os.getpid()}}", 0, 1, SLURM_JOB_ID=str(os.getpid()), SLURM_NTASKS="1")]
else:
    tasks = [start(f"n{{n + 1}}", n, 4) for n in range(4)]
sys.exit(max([task.wait() for task in tasks]))
"""
SCONTROL = f"""#!/bin/sh
case "$*" in
*"show job"*) echo "JobId={JOB} JobName=x UserId=u(1) JobState=RUNNING Reason=None BatchFlag=1" \\
    "Partition=p NodeList=n[1-4] BatchHost=n1 NumNodes=4 CPUs/Task=1 EndTime=Unknown" ;;
*"show partition"*) echo "PartitionName=standby State=UP Nodes=s1 MaxTime=UNLIMITED" ;;
*"show node"*) echo "NodeName=s1 State=IDLE Partitions=standby" ;;
*update*) ;;
*) exit 1 ;;
esac
"""


class Nodes(Step):
    """Four nodes of one rank each, and a standby partition whose node is not free yet."""

    def __init__(self, top: Path) -> None:
        super().__init__(top, 4)
        for name, text in (
            ("srun", SRUN.replace("{top}", str(top))),
            ("scontrol", SCONTROL),
            ("squeue", "#!/bin/sh\n"),
        ):
            (top / "bin" / name).write_text(text)
        sizes = {"SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n1"}
        self.env |= sizes | {"SLURM_TASKS_PER_NODE": "1(x4)", "ROBUST_WARM": "0"}
        self.env |= {"ROBUST_STANDBY_PARTITION": "standby", "OMP_NUM_THREADS": "1"}
        self.env |= {"ROBUST_STANDBY_WAIT": "1", "ROBUST_HANG_FLOOR": "300"}

    def crash(self, node: str) -> None:
        """SIGKILL for all processes of a node, none of which sees another one die before it."""
        wanted = {f"SLURMD_NODENAME={node}", f"ROBUST_STATE_DIR={self.state}"}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                env = set(path.read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                continue
            if wanted <= env:
                found.append(int(path.parent.name))
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                os.kill(pid, signum)

    def lines(self) -> list[list[Line]]:
        return [read_lines(self.top / f"rank-{rank}.jsonl") for rank in range(4)]

    def steps_in(self, epoch: int) -> int:
        return sum("step" in li and li["epoch"] == epoch for li in self.lines()[0])

    def incidents(self) -> list[Line]:
        return [one for path in self.state.rglob("incidents.jsonl") for one in read_lines(path)]


@pytest.mark.parametrize(("cut", "left"), [("", 3), ("fsdp", 3), ("hsdp", 2)])
def test_a_job_shrinks_and_grows_back_with_the_numbers_of_a_planned_change(
    cut: str, left: int, torch_forks: TorchForks, tmp_path: Path
) -> None:
    """4 nodes, no spare, no standby node that is free: 3 go on; one is free, and 4 go on.

    With HSDP the other node of the lost one's replica waits as a spare, and 2 go on. Each share of
    each batch is computed once; losses and state are those of runs in which the same changes were
    made without any fault, to the last bit.
    """
    job = Nodes(tmp_path)
    words = [f"--robust-min-nodes={left}", "--robust-checkpoint-overhead=0", sys.executable]
    options = [f"--cut={cut}"] if cut else []
    program = [str(PROGRAM), f"--dir={tmp_path}", f"--steps={STEPS}", "--pause=0.1", *options]
    job.start(tmp_path, *words, *program)
    try:
        job.until(lambda: job.steps_in(1) >= FIRST, "steps with 4 ranks", 120.0)
        job.crash("n2")
        job.until(lambda: job.steps_in(2) >= AGAIN, f"steps with {left} ranks", 120.0)
        (tmp_path / "free").touch()
        job.until(lambda: job.steps_in(3) >= AGAIN, "steps with 4 ranks again", 120.0)
        job.until(lambda: len(job.incidents()) > 1, "both incidents are over")
    finally:
        job.close()
    shrunk, grown = job.incidents()
    assert (shrunk["action"], shrunk["resized"], shrunk["outcome"]) == (
        "shrink", [4, left], "recovered",
    ), job.said()  # fmt: skip
    assert (grown["symptom"], grown["resized"]) == ("grow", [left, 4]), job.said()
    assert (shrunk["suspects"], grown["lost_steps"]) == (["n2"], 0)
    assert shrunk["lost_steps"] <= 1
    steps = merged(job.lines())
    check_shares(steps)
    check_same(steps, torch_forks, tmp_path, *options, smaller=left)
