"""srun lines that the SPANK plugin gives to robust-srun, and those that go back to srun.

In a job of ``sbatch --robust`` every srun becomes robust-srun (templates/spank_robust.c). What
robust-srun cannot run, and what is not the job's training, runs as plain srun.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from robust_slurm.state_dir.supervisor_lock import running_beside
from srun_wrapper.command.kinds import BCAST, MPI_TYPE, NO_WORLD, mpi_world
from srun_wrapper.command.srun_options import SrunCommand, UsageError
from srun_wrapper.command.srun_table import LONG
from srun_wrapper.command.step_request import StepRequest

BY_PLUGIN = "ROBUST_BY_PLUGIN"  # MODE:PATH-OF-SRUN, set by the plugin alone
# Slurm's variable for the plugin's option, from which every srun of the job takes it.
OPTION = "SLURM_SPANK__SLURM_SPANK_OPTION_robust_robust"
MODES = ("full", "observe")
SILENT = ("pty", "interactive")  # a person sees that this is a shell
LAUNCHERS = ("orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy")
"""Programs that mpirun starts by srun on each node."""
# srun's variables that say what an option says.
_VARIABLES = {"overlap": "SLURM_OVERLAP", "bcast": BCAST, "mpi": MPI_TYPE}
_REFUSED = {
    "overlap": "it shares its nodes with another step",
    "multi-prog": "its tasks are several programs",
    "het-group": "it is a part of a heterogeneous job",
    "no-allocate": "it has no allocation",
    "external-launcher": "another launcher starts its ranks",
    "bcast": "srun copies its program to the nodes",
    "clusters": "it names a cluster",
    "async": "srun does not wait for it",
}


class Handed(NamedTuple):
    """The mode that the plugin took from the job, and the srun that the user called."""

    mode: str
    srun: str


def handed(env: Mapping[str, str]) -> Handed | None:
    """Return what the plugin says; None: robust-srun was called by its name."""
    mode, _, srun = env.get(BY_PLUGIN, "").partition(":")
    return Handed(mode, srun) if mode in MODES else None


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return our environment: the plugin leaves alone every srun that we or our ranks start."""
    by = handed(env)
    # srun would take it for --clusters, and a step runs on the cluster of its job.
    dropped = (BY_PLUGIN, "SLURM_CLUSTERS")
    env = {name: value for name, value in env.items() if name not in dropped}
    if by is not None:  # many an srun line is no training, and must not run twice
        env.setdefault("ROBUST_EARLY_RESTART", "0")
    if OPTION in env:
        env[OPTION] = "off"
    if by and by.srun.startswith("/") and shutil.which("srun", path=env.get("PATH")) is None:
        directory = os.path.dirname(by.srun)  # noqa: PTH120 - a word of PATH
        env["PATH"] = f"{env['PATH']}:{directory}" if env.get("PATH") else directory
    return env


def to_srun(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become the srun that the user has called, with these words after ``srun``."""
    by = handed(env)
    kept = dict(env)
    program = "srun"
    if by is not None:
        kept[BY_PLUGIN] = f"back:{os.getpid()}"  # the plugin lets this process alone, once
        program = by.srun if by.srun.startswith("/") else program
    elif OPTION in kept:
        kept[OPTION] = "off"
    os.execvpe(program, ["srun", *argv], kept)


def back(
    by: Handed | None,
    error: UsageError,
    argv: Sequence[str],
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> NoReturn:
    """Run a line as plain srun if the plugin passed it; else raise the error."""
    if by is None:
        raise error
    if str(error):  # else a person sees it
        say(f"this line runs as plain srun: {error}")
    to_srun(argv, env)


def alone(
    records: Path | None,
    by: Handed | None,
    command: SrunCommand,
    argv: Sequence[str],
    env: Mapping[str, str],
    say: Callable[[str], None],
    *,
    observes: bool,
) -> None:
    """Warn if another robust-srun of the job runs, or become plain srun.

    Each restarts its own ranks in place, whatever the other does. Beside another, a line that the
    plugin passed, and one that only observes, runs as plain srun.
    """
    if records is None:
        return
    beside = running_beside(records, env.get("SLURM_RESTART_COUNT", ""))
    if not beside:
        return
    found = f"another robust-srun of this job is running ({beside})"
    if by is None and not observes:
        say(
            f"warning: {found}: each restarts its own ranks, but a requeue by one ends both, and "
            "neither knows the other's spare nodes"
        )
        return
    say(f"this line runs as plain srun: {found}")
    to_srun(argv if by is not None else [*command.argv(), *command.command], env)


def why_plain(
    command: SrunCommand, request: StepRequest, env: Mapping[str, str], spares: int
) -> str | None:
    """Return why a line runs as plain srun ("": a person sees why); None: robust-srun runs it."""
    given = request.given
    if given.intersection(SILENT):
        return ""
    variables = {option: name for option, name in _VARIABLES.items() if name in env}
    for option, why in _REFUSED.items():
        if option in given or (option == "multi-prog" and request.multi_prog):
            return f"--{option}: {why}"
        if option in variables:
            return f"{variables[option]} is set: {why}"
    by_option = command.get("mpi") is not None
    mpi = mpi_world(command) if by_option else env.get(MPI_TYPE)
    if mpi and mpi not in NO_WORLD:
        name = f"--mpi={mpi}" if by_option else f"{MPI_TYPE}={mpi}"
        return (
            f"{name}: its ranks are one MPI world, which cannot be started again in the "
            "step; torch needs no MPI: leave it out, or write --mpi=none"
        )
    program = command.command[0].rpartition("/")[2] if command.command else ""
    if program in LAUNCHERS:
        return f"{program}: mpirun starts its ranks below it"
    last = command.srun[-1] if command.srun else None
    if last is not None and last.name not in LONG and last.value is None:
        return (
            f"{last.words[0]}: an option that robust-srun does not know, so the next word may be "
            f"its value; write {last.words[0]}=VALUE, or put an option without one before another"
        )
    job = command.get("jobid")
    if job is not None and job.value != env.get("SLURM_JOB_ID"):
        return f"--jobid={job.value}: it is a step of another job"
    nodes = request.nodes_env or 1
    tasks = request.ntasks_cli
    fewest = nodes - spares
    asked = request.nodes_cli if request.nodes_cli is not None else nodes
    if tasks is not None:
        asked = min(asked, tasks)
    if asked < fewest:
        return (
            f"it uses {asked} of the job's {nodes} nodes; if the others are spares, "
            f"set ROBUST_SPARES={nodes - asked}"
        )
    return None
