"""A step of one node on this machine, without Slurm: robust-srun's tasks are children of ``srun``.

Slurm's other commands answer as while slurmctld is away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from places import REPOSITORY
from waiting import until

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
command = words[next(n for n, word in enumerate(words) if not word.startswith("-")) :]
tasks = int(os.environ["SLURM_NTASKS"])
shared = dict(os.environ, SLURM_STEP_ID="0", SLURM_NODEID="0", SLURM_STEP_NUM_NODES="1",
              SLURM_STEP_NUM_TASKS=str(tasks), SLURM_STEP_TASKS_PER_NODE=str(tasks),
              SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
own = lambda n: {{**shared, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}}
all_tasks = [subprocess.Popen(command, env=own(n)) for n in range(tasks)]
sys.exit(max(task.wait() for task in all_tasks))
"""
AWAY = "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
JOB = 77


class Step:
    """robust-srun in ``directory`` with so many tasks, until ``close``."""

    def __init__(self, top: Path, tasks: int) -> None:
        self.top, self.tasks = top, tasks
        self.state = top / "state"
        self.out = top / "out"
        self._process: subprocess.Popen[bytes] | None = None
        commands = top / "bin"
        commands.mkdir()
        for name in ("srun", "scontrol", "squeue", "sinfo"):
            (commands / name).write_text(SRUN if name == "srun" else AWAY)
            (commands / name).chmod(0o755)
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        sizes = ("SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "ROBUST"))},
            **dict.fromkeys(sizes, str(tasks)),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "here",
            "SLURMD_NODENAME": "here",
            "ROBUST_STATE_DIR": str(self.state),
            "PATH": path,
            "ROBUST_STOP_TESTS": "0",
            "ROBUST_STANDBY_PARTITION": "",
        }

    def start(self, directory: Path, *words: str, **env: str) -> None:
        argv = [sys.executable, "-m", "robust_slurm.commands", "srun_wrapper.cli"]
        self._process = subprocess.Popen(
            [*argv, f"-n{self.tasks}", *words],
            cwd=directory,
            env={**self.env, "PYTHONPATH": str(REPOSITORY), **env},
            stdin=subprocess.DEVNULL,
            stdout=self.out.open("ab"),
            stderr=subprocess.STDOUT,
        )

    def run(self, module: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours beside it."""
        argv = [sys.executable, "-m", "robust_slurm.commands", module, *words]
        env = {**self.env, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
        try:
            until(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()[-3000:]}") from None

    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def signal(self, signum: int) -> None:
        """Send robust-srun a signal."""
        assert self._process is not None
        self._process.send_signal(signum)

    def close(self) -> int:
        """End the step as Slurm would; robust-srun's exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        finally:
            self._process.kill()


def lines_with(text: str, words: Sequence[str]) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]
