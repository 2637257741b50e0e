"""The user's requests for the step: srun's options first, then srun's environment variables.

Only what robust-srun must know itself is read; srun reads the rest. Rules for the environment
are srun's own: a switch is on when its variable is empty, "yes" or a non-zero number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from srun_wrapper.command.srun_options import SrunCommand, UsageError


@dataclass(frozen=True, slots=True)
class StepRequest:
    """None: not asked for. ``*_cli`` from the command line, ``*_env`` from the environment.

    ``tasks_per_node``, ``cpus_per_task`` and the rest are from either, command line first.
    ``nodes_*`` is the minimum of a range. ``kill_on_bad_exit``: the value, 1 for a bare ``-K``.
    ``given``: canonical names of all options on the command line.
    """

    ntasks_cli: int | None = None
    ntasks_env: int | None = None
    nodes_cli: int | None = None
    nodes_env: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    label: bool = False
    output: str | None = None
    error: str | None = None
    input: str | None = None
    pty: bool = False
    exclude: str | None = None
    distribution: str | None = None
    kill_on_bad_exit: int | None = None
    unbuffered: bool = False
    multi_prog: bool = False
    open_mode: str | None = None
    given: frozenset[str] = frozenset()


def effective(cmd: SrunCommand, env: Mapping[str, str]) -> StepRequest:
    """Options, then environment. Raises UsageError for a count that is no number."""

    def has(option: str) -> bool:
        return cmd.get(option) is not None

    def value(option: str) -> str | None:
        found = cmd.get(option)
        return None if found is None else found.value

    def text(option: str, *variables: str) -> str | None:
        """The option's value, else the first variable that is set."""
        if has(option):
            return value(option)
        return next((env[name] for name in variables if name in env), None)

    def env_count(*variables: str, read: Callable[[str, str], int] = _count) -> int | None:
        return next((read(name, env[name]) for name in variables if name in env), None)

    def count(option: str, *variables: str) -> int | None:
        if has(option):
            return _count(f"--{option}", value(option) or "")
        return env_count(*variables)

    def switch(option: str, variable: str) -> bool:
        return has(option) or (variable in env and _is_on(env[variable]))

    kill_bad = text("kill-on-bad-exit", "SLURM_KILL_BAD_EXIT")
    kill_given = has("kill-on-bad-exit") or kill_bad is not None
    return StepRequest(
        ntasks_cli=count("ntasks"),
        ntasks_env=env_count("SLURM_NTASKS", "SLURM_NPROCS"),
        nodes_cli=_nodes("--nodes", value("nodes") or "") if has("nodes") else None,
        nodes_env=env_count("SLURM_JOB_NUM_NODES", "SLURM_NNODES", read=_nodes),
        tasks_per_node=count("ntasks-per-node", "SLURM_NTASKS_PER_NODE"),
        # Which of the two variables srun reads changed in 23.11; both mean the same.
        cpus_per_task=count("cpus-per-task", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"),
        label=switch("label", "SLURM_LABELIO"),
        output=text("output", "SRUN_OUTPUT", "SLURM_STDOUTMODE"),
        error=text("error", "SRUN_ERROR", "SLURM_STDERRMODE"),
        input=text("input", "SRUN_INPUT", "SLURM_STDINMODE"),
        pty=has("pty"),
        exclude=value("exclude"),
        distribution=text("distribution", "SLURM_DISTRIBUTION"),
        kill_on_bad_exit=_count("--kill-on-bad-exit", kill_bad or "1") if kill_given else None,
        unbuffered=switch("unbuffered", "SLURM_UNBUFFEREDIO"),
        multi_prog=switch("multi-prog", "SLURM_SRUN_MULTI"),
        open_mode=text("open-mode", "SLURM_OPEN_MODE"),
        given=frozenset(option.name for option in cmd.srun),
    )


def _is_on(text: str) -> bool:
    if text == "" or text.lower() == "yes":
        return True
    return re.fullmatch(r"\s*[+-]?\d+", text) is not None and int(text) != 0


def _count(origin: str, text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise UsageError(f"{origin}: {text!r} is not a number")
    return int(text)


def _nodes(origin: str, text: str) -> int:
    """Smallest node count of srun's ``-N``: "4", "2-4", "1k", "2,4,8" or "2-8:2"."""
    found = re.fullmatch(r"\s*(\d+)([kK]?)([mM]?)\s*(?:[-,:].*)?", text, re.ASCII | re.DOTALL)
    if found is None:
        raise UsageError(f"{origin}: {text!r} is not a number of nodes")
    scale = (1024 if found[2] else 1) * (1024**2 if found[3] else 1)
    return int(found[1]) * scale
