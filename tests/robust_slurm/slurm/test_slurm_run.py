"""The runner against real processes, and the environment that Slurm's commands get."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from robust_slurm.slurm import SlurmError, run_command
from robust_slurm.slurm.run import query_env, without_slurm

ENV = dict(os.environ)


def wait_gone(pid: int, deadline_s: float = 5.0) -> None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        os.sched_yield()
    raise AssertionError(f"process {pid} still runs")


def test_output_input_and_exit_code(tmp_path: Path) -> None:
    script = "read x; echo got $x; pwd; echo bad\\\\xff >&2; exit 7"
    done = run_command(["bash", "-c", script], 10, "line\n", ENV, tmp_path)
    assert done.returncode == 7
    assert done.stdout == f"got line\n{tmp_path}\n"
    assert done.stderr.startswith("bad")
    assert run_command(["printf", "\\377"], 10, None, ENV, None).stdout == "\ufffd"


@pytest.mark.slow
def test_the_deadline_kills_the_whole_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $! $$ > {pids}; echo half an answer >&2; wait"
    began = time.monotonic()
    with pytest.raises(SlurmError) as caught:
        run_command(["bash", "-c", script], 3.0, None, ENV, None)
    assert time.monotonic() - began < 20
    assert caught.value.kind == "timeout"
    assert "half an answer" in caught.value.message
    for pid in pids.read_text().split():
        wait_gone(int(pid))


@pytest.mark.slow
def test_a_child_that_left_the_group_cannot_hold_us(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import os,time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    with pytest.raises(SlurmError):
        run_command([sys.executable, "-c", script], 3.0, None, ENV, None)
    assert time.monotonic() - began < 20
    os.kill(int(pid_file.read_text()), 9)


def test_what_cannot_start_is_an_error_that_says_so() -> None:
    with pytest.raises(SlurmError, match="not in PATH"):
        run_command(["no-such-scontrol"], 1, None, ENV, None)
    with pytest.raises(SlurmError, match="cannot start"):
        run_command(["true", "a\0b"], 1, None, ENV, None)


def test_only_the_way_to_the_cluster_is_inherited() -> None:
    inherited = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "token",
        "SLURM_CLUSTERS": "other",
        "SLURM_JOB_ID": "5",
        "SLURM_MEM_PER_NODE": "100",
        "SLURMD_NODENAME": "n1",
        "SBATCH_PARTITION": "debug",
        "SQUEUE_FORMAT": "%i",
        "SCONTROL_FEDERATION": "1",
        "SLURM_TIME_FORMAT": "relative",
        "LC_TIME": "de_DE",
        "LANG": "de_DE.UTF-8",
        "TZ": "UTC",
    }
    reach = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token", "TZ": "UTC"}
    assert query_env(inherited) == reach | {
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "%s",
        "SLURM_BITSTR_LEN": "0",
    }
    assert without_slurm(inherited) == reach | {"LC_TIME": "de_DE", "LANG": "de_DE.UTF-8"}
