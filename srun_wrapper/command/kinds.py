"""Jobs and steps that robust-srun runs with restrictions, or refuses: MPI worlds, --clusters."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace

from robust_slurm.config import Config, flag
from srun_wrapper.command.srun_options import SrunCommand, UsageError
from srun_wrapper.command.step_request import StepRequest

REQUEUE_SIGNALS = ("USR1", "USR2", "TERM")
MPI_TYPE = "SLURM_MPI_TYPE"  # srun's variable for --mpi, which modules of an MPI often set
BCAST = "SLURM_BCAST"  # srun's variable for --bcast
NO_WORLD = ("none", "openmpi")  # values of --mpi under which srun sets up nothing
# Each of them starts ranks again in the step, or gives the step more tasks than the world has.
_NOT_WITH_MPI = ("spares", "replay", "code")


def requeue_signals(text: str) -> frozenset[int]:
    """Return the signals of ``requeue_on``. Raises UsageError."""
    found = set()
    for word in filter(None, re.split(r"[,\s]+", text.upper())):
        name = word.removeprefix("SIG")
        if name not in REQUEUE_SIGNALS:
            allowed = ", ".join(REQUEUE_SIGNALS)
            raise UsageError(f"{flag('requeue_on')}={text}: {word!r} is none of {allowed}")
        found.add(int(signal.Signals[f"SIG{name}"]))
    return frozenset(found)


def mpi_world(command: SrunCommand) -> str:
    """Return the --mpi that makes one MPI world of the step's tasks; "": none is asked for."""
    option = command.get("mpi")
    value = option.value if option is not None else None
    return value if value and value not in NO_WORLD else ""


def for_kind(config: Config, command: SrunCommand) -> Config:
    """Return the settings without what ranks of an MPI world cannot have. Raises UsageError."""
    world = mpi_world(command)
    if not world or config.mode != "full":
        return config
    if wrong := [flag(name) for name in _NOT_WITH_MPI if getattr(config, name)]:
        raise UsageError(
            f"--mpi={world} makes one MPI world of the ranks, which cannot be started again in "
            f"the step: leave out {', '.join(wrong)}, or --mpi (torch needs none)"
        )
    slow = "warn" if config.slow == "replace" else config.slow
    return replace(config, standby_partition="", warm=False, slow=slow)


def accepted(
    command: SrunCommand, request: StepRequest, config: Config, env: Mapping[str, str]
) -> SrunCommand:
    """Return the command without redundant options. Raises UsageError if it cannot be run."""
    if request.multi_prog:
        raise UsageError(
            "--multi-prog is not supported: every task runs robust-task, which starts one command; "
            "let a shell choose by rank instead: robust-srun bash -c 'case $SLURM_PROCID in "
            "0) exec first;; *) exec others;; esac'"
        )
    if command.get("bcast") is not None:
        raise UsageError(
            "--bcast is not supported: srun would copy robust-task's python, not your program: "
            "leave --bcast out, and start the program from a file system that all nodes share"
        )
    requeue_signals(config.requeue_on)
    clusters, own = command.get("clusters"), env.get("SLURM_CLUSTER_NAME", "")
    if clusters is None:
        return command
    if not own or clusters.value != own:
        raise UsageError(
            f"--clusters={clusters.value}: a step runs on the cluster of its job"
            f"{f' ({own})' if own else ''}: leave it out here, and choose the cluster of the job: "
            f"sbatch --clusters={clusters.value}"
        )
    return command.without(["clusters"])


def warning(command: SrunCommand, config: Config, env: Mapping[str, str]) -> str:
    """Return what a fault costs a job of this kind; "": as for all others."""
    world = mpi_world(command)
    if config.mode != "full":
        return ""
    if not world:
        return _spares_in_a_world(command, config, env)
    then = (
        f"the job is requeued, until it has started {config.max_restarts + 1} times"
        if config.requeue == "auto"
        else "the job ends (requeue = never)"
    )
    return (
        f"warning: --mpi={world} makes one MPI world of the ranks, which cannot be started again "
        f"in the step: after a fault {then}; torch needs no --mpi: without it robust-srun restarts "
        "the ranks in place"
    )


def _spares_in_a_world(command: SrunCommand, config: Config, env: Mapping[str, str]) -> str:
    """Return a warning for an MPI program with spares; srun's variable does not prove it is one.

    Torch, under the same variable, needs no MPI and keeps its spares and restarts in place.
    """
    value = env.get(MPI_TYPE, "")
    if not config.spares or not value or value in NO_WORLD or command.get("mpi") is not None:
        return ""
    return (
        f"warning: {MPI_TYPE}={value} is set: an MPI program would wait in MPI_Init for the spare "
        f"nodes for ever: give --mpi={value}, without --robust-spares; if this one uses no MPI "
        "(torch does not), all is well, and --mpi=none says so"
    )
