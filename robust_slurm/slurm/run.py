"""Run one command with a deadline: the only place that starts Slurm's programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from robust_slurm.slurm.errors import NO_COMMAND, SlurmError

# Seconds to collect what a killed command had written before its pipes are closed.
_REAP_S = 0.5

# Of the inherited SLURM_* names, only those that say how to reach the cluster are passed on. All
# others are either options in disguise (SLURM_CLUSTERS, SLURM_BITSTR_LEN, SLURM_DEBUG_FLAGS), or
# describe the job we run in and would leak into one that we submit (SLURM_MEM_PER_NODE and
# SLURM_MEM_PER_CPU together make srun refuse to start).
_KEPT = frozenset(
    {
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_JWT",
        "SLURM_SACK_JWKS",
        "SLURM_SACK_KEY",
        "SLURM_SACK_SOCKET",
    }
)
# SLURM covers SLURM_*, SLURMD_* and SLURMCTLD_*.
_STRIPPED_PREFIXES = (
    "SLURM",
    "SACCT_",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SQUEUE_",
    "SRUN_",
)


@dataclass(frozen=True)
class Completed:
    """Result of a command; the streams are text (bytes that are not UTF-8 replaced)."""

    returncode: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs a command to its end. Raises SlurmError ``timeout`` at the deadline."""

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed: ...


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less every variable that steers Slurm's commands or describes a job."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_STRIPPED_PREFIXES)
    }


def query_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for reading: C locale, times as epoch seconds, array lists in full."""
    env = without_slurm(environ)
    for name in [n for n in env if n.startswith("LC_") or n in ("LANG", "LANGUAGE")]:
        del env[name]
    return env | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


_ENDS_US = {("scontrol", "requeue")}


def run_command(
    argv: Sequence[str],
    deadline_s: float,
    input: str | None,
    env: Mapping[str, str],
    cwd: Path | None,
) -> Completed:
    """Run ``argv`` in a session of its own; at the deadline its whole process group is killed."""
    # Looked up in our own PATH: the env of a submitted job may not have Slurm's directory.
    program = shutil.which(argv[0])
    if program is None:
        raise SlurmError(
            "other", argv, argv[0] + NO_COMMAND, "install Slurm's client commands here"
        )
    words = [program, *argv[1:]]
    if tuple(argv[:2]) in _ENDS_US:
        # Its effect, a SIGTERM to the whole job, reaches this command too, before it has answered.
        words = ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh", *words]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, ValueError) as error:  # E2BIG, ENOMEM; a NUL byte in an argument
        raise SlurmError("other", argv, f"cannot start {program}: {error}") from error
    try:
        out, err = process.communicate(input, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        err = _kill(process)
        said = f" (it said: {err.strip()[:200]})" if err.strip() else ""
        raise SlurmError("timeout", argv, f"no answer in {deadline_s:g} s{said}") from None
    except BaseException:
        _kill(process)
        raise
    return Completed(process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> str:
    """Kill the group and return what stderr held.

    Waits neither for a child that left the group nor for one that hangs in the kernel (a dead
    file system): SIGKILL ends that one when it can.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    try:
        return process.communicate(timeout=_REAP_S)[1] or ""
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return ""
    finally:
        process.poll()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
